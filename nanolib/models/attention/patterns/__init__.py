"""Sparse patterns: each file turns options into a `Pattern`, a mask that knows where its keys lie.

A new pattern is one file and one line in `PATTERNS`.
"""

from nanolib.models.attention.patterns import bigbird, block, local_global, random, strided, window
from nanolib.models.attention.patterns.pattern import Pattern

PATTERNS = {
    "window": window.pattern,
    "local_global": local_global.pattern,
    "strided": strided.pattern,
    "block": block.pattern,
    "random": random.pattern,
    "bigbird": bigbird.pattern,
}

# Patterns whose `window` is searched for when a sparsity is asked for; the others follow the sparsity by themselves.
WINDOWED = ("window", "local_global", "bigbird")

__all__ = ["PATTERNS", "WINDOWED", "Pattern"]
