"""Our sparse attention against torch's dense one and compiled FlexAttention, our model against Hugging Face's: `make bench`.

Each round times all that are compared, so that drift hits them alike; the ratio of a round is the datum, and the interval is that
of the median ratio. Next to it is what skipping allows: a kernel that computes the kept tiles can gain
1 / (1 − block sparsity).
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.experiments.model.steps import Generating, Inferring, Training
from nanolib.measurement import Measurement
from nanolib.meters import measure_phases
from nanolib.models import attention
from nanolib.models.user import logits_of
from nanolib.stats.intervals import Interval, median_interval
from tests.models.llama import llama_like

HEADS, HEAD_DIM, BLOCK = 8, 64, 128
SHARES = (0.5, 0.75, 0.9)
DENSE = {"backend": "flash"}
PRESET, LENGTH, PROMPT, NEW_TOKENS = "small", 128, 64, 64


def main() -> None:
    """Print one line per pattern, dtype, length and sparsity."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--budget", type=float, default=4.0, help="seconds per line")
    options.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096, 8192])
    chosen = options.parse_args()
    print(
        f"batch 1, {HEADS} heads × {HEAD_DIM}, random tiles of {BLOCK}, not causal, forward; × faster than dense (flash)"
    )
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, n, share in itertools.product(dtypes, chosen.lengths, SHARES):
        _print_forward(dtype, n, False, _random(share), chosen.budget)
    print("the same, causal, window 256")
    for n in chosen.lengths:
        window = {"pattern": "window", "window": 256}
        _print_forward(torch.float32, n, True, window, chosen.budget)
    print("backward, random tiles, not causal (FlexAttention has none on CPU)")
    for share in SHARES:
        _print_backward(4096, _random(share), chosen.budget)
    _print_hugging_face(4 * chosen.budget)


def _rounds(phases: dict[str, Callable[[], object]], budget: float) -> dict[str, Measurement]:
    """Time the phases in at least ten rounds, however long that takes."""
    once = measure_phases(phases, budget_s=0.01)["total"].samples[-1] / 1e3
    return measure_phases(phases, budget_s=max(budget, 10 * once))


def _ratio(rows: dict[str, Measurement], over: str, under: str) -> Interval:
    return median_interval(np.asarray(rows[over].samples) / np.asarray(rows[under].samples))


def _text(found: Interval) -> str:
    return f"{found.estimate:5.2f}× [{found.low:.2f} … {found.high:.2f}]"


def _random(sparsity: float) -> dict:
    return {"pattern": "random", "sparsity": sparsity, "block_size": BLOCK, "seed": 1}


def _inputs(dtype: torch.dtype, n: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, n, HEAD_DIM).to(dtype) for _ in range(3)]


def _print(dtype: torch.dtype, n: int, causal: bool, mask: dict, rows: dict) -> None:
    """Print how many times faster than dense each is, and which share of the bound."""
    dense = attention.work("dense", n, n, causal=causal)
    kept = attention.work("sparse", n, n, causal=causal, options=mask)
    bound = dense.kept_tiles / kept.kept_tiles
    sparse = _ratio(rows, "dense", "sparse")
    line = f"  {str(dtype).removeprefix('torch.'):9} n={n:5d} {mask.get('sparsity', '')!s:4} bound {bound:5.2f}"
    line += f"  sparse {_text(sparse)} = {sparse.estimate / bound:.2f} of it"
    if "flex" in rows:
        line += f"   flex {_text(_ratio(rows, 'dense', 'flex'))}"
        line += f"   sparse over flex {_text(_ratio(rows, 'flex', 'sparse'))}"
    print(line, flush=True)


def _print_forward(dtype: torch.dtype, n: int, causal: bool, mask: dict, budget: float) -> None:
    inputs = _inputs(dtype, n)
    kinds = {"dense": DENSE, "sparse": mask, "flex": mask}
    phases = {
        kind: functools.partial(attention.attend, kind, *inputs, causal=causal, options=given)
        for kind, given in kinds.items()
    }
    with torch.no_grad():
        error = (phases["sparse"]() - phases["flex"]()).abs().max()
        assert error < 0.02, f"the two disagree by {error}"
        _print(dtype, n, causal, mask, _rounds(phases, budget))


def _print_backward(n: int, mask: dict, budget: float) -> None:
    inputs = [x.requires_grad_() for x in _inputs(torch.float32, n)]
    phases = {}
    for kind, given in {"dense": DENSE, "sparse": mask}.items():
        out = attention.attend(kind, *inputs, causal=False, options=given)
        phases[kind] = functools.partial(
            torch.autograd.grad, out, inputs, torch.ones_like(out), retain_graph=True
        )
    _print(torch.float32, n, False, mask, _rounds(phases, budget))


def _print_hugging_face(budget: float) -> None:
    """Print how many times as fast as `LlamaForCausalLM` our model of the same weights is."""
    config = NanoConfig.from_preset(PRESET)
    ours = create_model(config, seed=0)
    theirs = llama_like(ours)
    models, ids = (ours, theirs), generate_random_batch(1, LENGTH + 1, config.vocab_size, seed=0)
    with torch.no_grad():
        apart = (logits_of(ours.eval())(ids) - logits_of(theirs.eval())(ids)).abs().max()
    print(
        f"{PRESET} against Hugging Face's Llama of the same weights, float32, batch 1: logits at most {apart:.1e} apart"
    )
    generating = [Generating(model, ids[:, :PROMPT], NEW_TOKENS) for model in models]
    for step in generating:
        step.generation.prefill()
    for what, calls in {
        f"forward, n={LENGTH}": [Inferring(model, ids[:, :-1], "eager") for model in models],
        f"decode after {PROMPT} to {PROMPT + NEW_TOKENS} tokens": [
            step.generation.decode for step in generating
        ],
        f"training step, n={LENGTH}": [Training(model, ids, "eager", 1e-5) for model in models],
    }.items():
        rows = _rounds(dict(zip(("ours", "theirs"), calls, strict=True)), budget)
        times = ", ".join(f"{name} {rows[name].estimate:.1f} ms" for name in ("ours", "theirs"))
        print(
            f"  {what:42} ours is {_text(_ratio(rows, 'theirs', 'ours'))} as fast ({times})",
            flush=True,
        )


if __name__ == "__main__":
    main()
