"""Our sparse attention against torch's dense one and compiled FlexAttention, our model against Hugging Face's: `make bench`.

Each round times all that are compared, so that drift hits them alike; the ratio of a round is the datum, and the interval is that
of the median ratio. Next to it is what skipping allows: a kernel that computes the kept tiles can gain
1 / (1 − block sparsity).
"""

import argparse
import functools
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.experiments.model.steps import Generating, Inferring, Training
from nanolib.meters import Timing, measure_phases
from nanolib.models import attention
from nanolib.models.user import logits_of
from nanolib.stats.intervals import median_interval
from tests.models.llama import llama_like

HEADS, HEAD_DIM = 8, 64
RANDOM = [
    {"pattern": "random", "sparsity": share, "block_size": 128, "seed": 1}
    for share in (0.5, 0.75, 0.9)
]
WINDOW = {"pattern": "window", "window": 256}
PRESET, LENGTH, PROMPT, NEW_TOKENS = "small", 128, 64, 64


def main():
    """Print one line per pattern, dtype, length and sparsity."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--budget", type=float, default=4.0, help="seconds per line")
    options.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096, 8192])
    chosen = options.parse_args()
    print(f"batch 1, {HEADS} heads × {HEAD_DIM}, forward; × faster than dense (flash)")
    for dtype in (torch.float32, torch.bfloat16):
        for n in chosen.lengths:
            for mask in RANDOM:
                _print_attention(dtype, n, mask, chosen.budget)
    for n in chosen.lengths:
        _print_attention(torch.float32, n, WINDOW, chosen.budget, causal=True)
    print("backward (FlexAttention has none on CPU)")
    for mask in RANDOM:
        _print_attention(torch.float32, 4096, mask, chosen.budget, backward=True)
    _print_hugging_face(4 * chosen.budget)


def _ratios(phases, budget):
    """Of each phase over each other the ratio of times, in at least ten rounds, however long that takes."""
    once = measure_phases(Timing(phases, budget_s=0.01))["total"].samples[-1] / 1e3
    rows = measure_phases(Timing(phases, budget_s=max(budget, 10 * once)))
    samples = {name: np.asarray(rows[name].samples) for name in phases}
    found = {}
    for over in phases:
        for under in phases:
            low, ratio, high = median_interval(samples[over] / samples[under])
            found[over, under] = f"{ratio:5.2f}× [{low:.2f} … {high:.2f}]"
    return found


def _print_attention(dtype, n, mask, budget, *, causal=False, backward=False):
    """Print how many times faster than dense each is, next to the bound."""
    inputs = [
        torch.randn(1, HEADS, n, HEAD_DIM).to(dtype).requires_grad_(backward) for _ in range(3)
    ]
    kinds = {"dense": {"backend": "flash"}, "sparse": mask}
    calls = {
        kind: functools.partial(attention.attend, kind, *inputs, causal=causal, options=options)
        for kind, options in (kinds if backward else kinds | {"flex": mask}).items()
    }
    outputs = {kind: call() for kind, call in calls.items()}
    if backward:
        ones = torch.ones_like(inputs[0])
        calls = {
            kind: functools.partial(torch.autograd.grad, out, inputs, ones, retain_graph=True)
            for kind, out in outputs.items()
        }
    else:
        error = (outputs["sparse"] - outputs["flex"]).abs().max()
        assert error < 0.02, f"the two disagree by {error}"
    dense, sparse = (
        attention.work(kind, n, n, causal=causal, options=kinds[kind]).kept_tiles
        for kind in ("dense", "sparse")
    )
    ratios = _ratios(calls, budget)
    line = f"  {dtype} n={n:5d} {mask.get('sparsity', 'causal, window 256')!s:4}"
    line += f" bound {dense / sparse:5.2f}  sparse {ratios['dense', 'sparse']}"
    if not backward:
        line += f"   flex {ratios['dense', 'flex']}   sparse over flex {ratios['flex', 'sparse']}"
    print(line, flush=True)


def _print_hugging_face(budget):
    """Print how many times as fast as `LlamaForCausalLM` our model of the same weights is."""
    config = NanoConfig.from_preset(PRESET)
    ours = create_model(config, seed=0)
    models = {"ours": ours.eval(), "theirs": llama_like(ours).eval()}
    ids = generate_random_batch(1, LENGTH + 1, config.vocab_size, seed=0)
    with torch.no_grad():
        logits = [logits_of(model)(ids) for model in models.values()]
    apart = (logits[0] - logits[1]).abs().max()
    print(f"{PRESET}, float32, batch 1: logits at most {apart:.1e} from Hugging Face's Llama")
    forward, decode, training = {}, {}, {}
    for name, model in models.items():
        generating = Generating(model, ids[:, :PROMPT], NEW_TOKENS)
        generating.generation.prefill()
        forward[name] = Inferring(model, ids[:, :-1], "eager")
        decode[name] = generating.generation.decode
        training[name] = Training(model, ids, "eager", 1e-5)
    for what, calls in {
        f"forward, n={LENGTH}": forward,
        f"decode after {PROMPT} to {PROMPT + NEW_TOKENS} tokens": decode,
        f"training step, n={LENGTH}": training,
    }.items():
        text = _ratios(calls, budget)["theirs", "ours"]
        print(f"  {what:42} ours is {text} as fast", flush=True)


if __name__ == "__main__":
    main()
