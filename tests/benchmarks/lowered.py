"""Compiled FlexAttention over each pattern's mask against the float64 reference: python tests/benchmarks/lowered.py.

It compiles a kernel per pattern, some seconds each; `tests/models/test_flex.py` holds the masks and gradients without one.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from nanolib.models import attention
from nanolib.models.attention import sparse
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import masked_attention, relative_error


def main() -> None:
    """Print the error of each pattern, causal and not, and how long the first and a later call on other inputs took."""
    for pattern in [*PATTERNS, *CHOOSERS]:
        per_head = pattern in ("random", "bigbird")
        options = {"pattern": pattern, "window": 100, "random_tokens": 128, "block_size": 128, "per_head": per_head}
        for causal in (True, False):
            errors, took = zip(*(_once(options, causal, seed) for seed in (0, 1)), strict=True)
            times = " and ".join(f"{1e3 * s:.1f} ms" for s in took)
            print(f"{pattern:12} causal {causal!s:5} relative error {max(errors):.1e}   {times}", flush=True)
            assert max(errors) <= 1e-5


def _once(options: dict, causal: bool, seed: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, 700, 32, generator=generator) for heads in (4, 2, 2))
    mask = sparse.choose_mask(q, k, causal=causal, options=sparse.Options(**options))
    elements = torch.stack([mask.elements(head) for head in range(len(mask.plans))])
    with torch.no_grad():
        start = time.perf_counter()
        out = attention.attend("flex", q, k, v, causal=causal, options=options)
        seconds = time.perf_counter() - start
    return relative_error(out, masked_attention(q, k, v, elements)), seconds


if __name__ == "__main__":
    main()
