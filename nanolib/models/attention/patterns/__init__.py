"""Sparse patterns: each file turns options into a `Pattern`, a mask that knows where its keys lie.

A new pattern is one file and one line in `PATTERNS`.
"""

from nanolib.models.attention.patterns import local_global, window
from nanolib.models.attention.patterns.pattern import Pattern

PATTERNS = {"window": window.pattern, "local_global": local_global.pattern}

__all__ = ["PATTERNS", "Pattern"]
