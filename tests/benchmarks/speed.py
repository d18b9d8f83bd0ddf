"""Our sparse attention against torch's dense attention and FlexAttention: `make bench`.

Each round times all that are compared, so that drift hits them alike; the ratio of a round is the
datum, and the interval is that of the median ratio. Next to it is what skipping allows: a kernel
that computes the kept tiles can gain 1 / (1 − block sparsity).
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib.experiments.attention.case import AttentionCase
from nanolib.meters import Timing, measure_phases
from nanolib.stats.intervals import median_interval

HEADS, HEAD_DIM = 8, 64
RANDOM = [
    {"pattern": "random", "sparsity": share, "block_size": 128, "seed": 1}
    for share in (0.5, 0.75, 0.9)
]
WINDOW = {"pattern": "window", "window": 256}
LENGTHS, BUDGET_S = (2048, 4096, 8192), 4.0  # seconds per line


def main():
    """Print one line per pattern, dtype, length and sparsity."""
    print(f"batch 1, {HEADS} heads × {HEAD_DIM}, forward; × faster than dense (flash)")
    for dtype in ("float32", "bfloat16"):
        for n in LENGTHS:
            for mask in RANDOM:
                _print_attention(dtype, n, mask)
    for n in LENGTHS:
        _print_attention("float32", n, WINDOW, causal=True)
    print("backward (FlexAttention has none on CPU)")
    for mask in RANDOM:
        _print_attention("float32", 4096, mask, backward=True)


def _times(phases, budget):
    """The times of each phase, in at least ten rounds, however long that takes."""
    once = measure_phases(Timing(phases, budget_s=0.01))["total"].samples[-1] / 1e3
    rows = measure_phases(Timing(phases, budget_s=max(budget, 10 * once)))
    return {name: np.asarray(row.samples) for name, row in rows.items()}


def _ratio(over, under):
    low, ratio, high = median_interval(over / under)
    return f"{ratio:5.2f}× [{low:.2f} … {high:.2f}]"


def _print_attention(dtype, n, mask, *, causal=False, backward=False):
    """Print how many times faster than dense each is, next to the bound."""
    kinds = {"dense": {"backend": "flash"}, "sparse": mask} | ({} if backward else {"flex": mask})
    shape = (n, 1, dtype, HEADS, HEADS, HEAD_DIM, causal, backward)
    cases = {name: AttentionCase("cpu", name, name, kinds[name], *shape) for name in kinds}
    inputs = cases["dense"].inputs(0)
    calls = {
        name: case._backward_call(inputs) if backward else next(case.workloads(*inputs)).call
        for name, case in cases.items()
    }
    if not backward:
        error = (calls["sparse"]() - calls["flex"]()).abs().max()
        assert error < 0.02, f"the two disagree by {error}"
    bound = cases["dense"].work.kept_tiles / cases["sparse"].work.kept_tiles
    times = _times(calls, BUDGET_S)
    line = f"  torch.{dtype} n={n:5d} {mask.get('sparsity', 'causal, window 256')!s:4}"
    line += f" bound {bound:5.2f}  sparse {_ratio(times['dense'], times['sparse'])}"
    if not backward:
        line += f"   flex {_ratio(times['dense'], times['flex'])}"
        line += f"   sparse over flex {_ratio(times['flex'], times['sparse'])}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
