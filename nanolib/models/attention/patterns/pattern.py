"""What a sparse pattern is: an element mask, and the key ranges outside which it is empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = tuple[int, int]


@dataclass(frozen=True)
class Pattern:
    """A sparse pattern, without causality (which is applied on top).

    Attributes:
        mask: (query positions [m, 1], key positions [1, n]) -> bool [m, n], True where a query sees a key.
        runs: (first and last query position) -> key ranges [start, stop) that hold every kept key of these
            queries, in order, disjoint; they may exceed the sequence's ends.
    """

    mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    runs: Callable[[int, int], list[Run]]


def merge_runs(runs: list[Run], length: int) -> list[Run]:
    """`runs` cut to [0, length), sorted, with overlapping and touching ones joined."""
    merged: list[Run] = []
    for start, stop in sorted((max(0, start), min(length, stop)) for start, stop in runs):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
