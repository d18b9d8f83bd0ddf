"""Sparse against dense attention, timed in turn within one run: `make bench`.

Each round times dense and then sparse, so that drift hits both alike; the ratio of a round is the datum, and the interval
is that of the median ratio. Beside it stands the bound that skipped tiles set.
"""

import numpy as np
import torch

from nanolib.meters import measure_phases
from nanolib.models import attention
from nanolib.stats.intervals import median_interval

HEADS, HEAD_DIM = 8, 64
OPTIONS = {"pattern": "window", "window": 256}


def main() -> None:
    """Print one line per sequence length and dtype."""
    print("sparse (window 256) against dense (flash), causal, batch 1, 8 heads × 64, forward")
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1024, 2048, 4096, 8192):
            q, k, v = (torch.randn(1, HEADS, n, HEAD_DIM).to(dtype) for _ in range(3))
            phases = {
                "dense": lambda: attention.attend("dense", q, k, v, causal=True, options={"backend": "flash"}),  # noqa: B023
                "sparse": lambda: attention.attend("sparse", q, k, v, causal=True, options=OPTIONS),  # noqa: B023
            }
            with torch.no_grad():
                rows = measure_phases(phases, budget_s=5.0)
            ratio = median_interval(np.asarray(rows["dense"].samples) / np.asarray(rows["sparse"].samples))
            dense = attention.work("dense", n, n, causal=True)
            bound = attention.work("sparse", n, n, causal=True, options=OPTIONS).speed_bound(dense)
            print(
                f"  {dtype!s:15} n={n:5d}  {ratio.estimate:5.2f}× [{ratio.low:.2f} … {ratio.high:.2f}] of {bound:5.2f}×"
            )


if __name__ == "__main__":
    main()
