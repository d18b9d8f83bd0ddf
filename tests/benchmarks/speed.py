"""Our sparse attention against torch's dense one and compiled FlexAttention, our model against Hugging Face's: `make bench`.

Each round times all that are compared, so that drift hits them alike; the ratio of a round is the datum, and the interval is that
of the median ratio. Next to it is what skipping allows: a kernel that computes the kept tiles can gain
1 / (1 − block sparsity).
"""

import argparse
import sys
from pathlib import Path

import torch
from parts.rounds import ratio, rounds, text

from nanolib.models import attention

sys.path.insert(0, str(Path(__file__).parents[2]))
from parts.hugging_face import (
    against_hugging_face,
)  # which takes the model that the tests compare with

HEADS, HEAD_DIM, BLOCK = 8, 64, 128


def main() -> None:
    """Print one line per pattern, dtype, length and sparsity."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--budget", type=float, default=4.0, help="seconds per line")
    options.add_argument("--lengths", type=int, nargs="*", default=[2048, 4096, 8192])
    chosen = options.parse_args()
    print(
        f"batch 1, {HEADS} heads × {HEAD_DIM}, random tiles of {BLOCK}, not causal, forward; × faster than dense (flash)"
    )
    for dtype in (torch.float32, torch.bfloat16):
        for n in chosen.lengths:
            for sparsity in (0.5, 0.75, 0.9):
                mask = {"pattern": "random", "sparsity": sparsity, "block_size": BLOCK, "seed": 1}
                print(_line(dtype, n, sparsity, False, mask, chosen.budget), flush=True)
    print("the same, causal, window 256")
    for n in chosen.lengths:
        print(
            _line(
                torch.float32, n, None, True, {"pattern": "window", "window": 256}, chosen.budget
            ),
            flush=True,
        )
    print("backward, random tiles, not causal (FlexAttention has none on CPU)")
    for sparsity in (0.5, 0.75, 0.9):
        print(
            _backward(
                4096,
                {"pattern": "random", "sparsity": sparsity, "block_size": BLOCK},
                chosen.budget,
            ),
            flush=True,
        )
    for line in against_hugging_face(4 * chosen.budget):
        print(line, flush=True)


def _inputs(dtype: torch.dtype, n: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, n, HEAD_DIM).to(dtype) for _ in range(3)]


def _line(
    dtype: torch.dtype, n: int, sparsity: float | None, causal: bool, mask: dict, budget: float
) -> str:
    q, k, v = _inputs(dtype, n)
    phases = {
        "dense": lambda: attention.attend(
            "dense", q, k, v, causal=causal, options={"backend": "flash"}
        ),
        "sparse": lambda: attention.attend("sparse", q, k, v, causal=causal, options=mask),
        "flex": lambda: attention.attend("flex", q, k, v, causal=causal, options=mask),
    }
    with torch.no_grad():
        error = (phases["sparse"]() - phases["flex"]()).abs().max()
        assert error < 0.02, f"the two disagree by {error}"
        rows = rounds(phases, budget)
    dense = attention.work("dense", n, n, causal=causal)
    kept = attention.work("sparse", n, n, causal=causal, options=mask)
    bound = dense.kept_tiles / kept.kept_tiles
    sparse, flex = (ratio(rows, "dense", kind) for kind in ("sparse", "flex"))
    over = ratio(rows, "flex", "sparse")
    label = "" if sparsity is None else f" {sparsity:.0%}"
    return (
        f"  {str(dtype).removeprefix('torch.'):9} n={n:5d}{label:5} bound {bound:5.2f}  sparse {text(sparse)} = "
        f"{sparse.estimate / bound:.2f} of it   flex {text(flex)}   sparse over flex {text(over)}"
    )


def _backward(n: int, mask: dict, budget: float) -> str:
    inputs = [x.requires_grad_() for x in _inputs(torch.float32, n)]
    outs = {
        "dense": attention.attend("dense", *inputs, causal=False, options={"backend": "flash"}),
        "sparse": attention.attend("sparse", *inputs, causal=False, options=mask),
    }
    gradient = torch.randn_like(outs["dense"])
    phases = {
        name: lambda out=out: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        for name, out in outs.items()
    }
    rows = rounds(phases, budget)
    dense, kept = (
        attention.work(kind, n, n, causal=False, options=given)
        for kind, given in (("dense", None), ("sparse", mask))
    )
    bound = dense.kept_tiles / kept.kept_tiles
    faster = ratio(rows, "dense", "sparse")
    share = faster.estimate / bound
    return f"  float32   n={n:5d} {mask['sparsity']:.0%} bound {bound:5.2f}  sparse {text(faster)} = {share:.2f} of it"


if __name__ == "__main__":
    main()
