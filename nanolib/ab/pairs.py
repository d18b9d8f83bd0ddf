"""What is compared and how, and the block times that are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nanolib.measurement import Direction, Status, case_name
from nanolib.stats.compare import THRESHOLD, Verdict

CALL = "call"
# The smallest number for which a median has a 95 % interval. From it on, a pair of processes is the datum.
ENOUGH_PROCESS_PAIRS = 6


@dataclass(frozen=True)
class Settings:
    """How two versions are compared.

    Attributes:
        threshold: The smallest change that counts, as a share.
        budget_s: Time limit for one case, process start-up included, s.
        rel_ci: A case is done when the half-width of its ratio's interval is at most this share.
        direction: Which way the metric is better.
        timeout_s: Time limit for one response of a version, s.
        timed: Whether blocks are timed. Otherwise each version runs a case once, and its rows count.
        total_s: Time limit for all cases together, s.
    """

    threshold: float = THRESHOLD
    budget_s: float = 60.0
    rel_ci: float = 0.01
    direction: Direction = Direction.LOWER
    timeout_s: float = 300.0
    timed: bool = True
    total_s: float = math.inf


@dataclass(frozen=True)
class Task:
    """One case or function to compare.

    Attributes:
        experiment: Its notebook; `CALL` for a function.
        case_id: Its id.
        factors: What defines it.
        requests: What A and B are asked to do.
    """

    experiment: str
    case_id: str
    factors: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], Mapping[str, Any]]

    @property
    def case(self) -> str:
        """The name of the case."""
        return case_name(self.factors)

    @property
    def device(self) -> str:
        """The device of the case, or the one that a function may use, found without the import of torch, which takes seconds."""
        default = "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
        return str(self.factors.get("device", default))


@dataclass
class Pairs:
    """Blocks of A and B in pairs.

    Attributes:
        a: Block times of A, ms.
        b: Block times of B, ms, in the same order.
        generations: How many of them each pair of processes measured, in that order.
    """

    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(self.a + other.a, self.b + other.b, self.generations + other.generations)

    @property
    def by_process(self) -> bool:
        """Whether there are enough pairs of processes for each to be one datum."""
        return len(self.generations) >= ENOUGH_PROCESS_PAIRS

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the data of A and B for a verdict.

        Returns:
            1 and the median ratio of each pair of processes. If there are too few pairs of processes, all block times.
        """
        a, b = np.asarray(self.a), np.asarray(self.b)
        if not self.by_process:
            return a, b
        parts = np.split(b / a, np.cumsum(self.generations)[:-1])
        return np.ones(len(parts)), np.array([np.median(part) for part in parts])

    def __str__(self) -> str:
        """How many there are."""
        return f"{len(self.a)} pairs in {len(self.generations)} pairs of processes"


@dataclass
class TaskResult:
    """What is known of a task; it grows with each pair of processes.

    Attributes:
        task: What is compared.
        blocks: Scope → its pairs.
        rows: The rows that A and B made in the last pair of processes.
        endings: Status and message of A and B in the last pair of processes.
        verdicts: Scope → verdict; a scope with too few pairs has none.
    """

    task: Task
    blocks: dict[str, Pairs] = field(default_factory=dict)
    rows: list[list[dict[str, Any]]] = field(default_factory=lambda: [[], []])
    endings: list[tuple[str, str]] = field(default_factory=lambda: [(Status.OK, "")] * 2)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def add(self, blocks: Mapping[str, Pairs]) -> None:
        """Add the blocks of another pair of processes."""
        for scope, pairs in blocks.items():
            self.blocks[scope] = self.blocks.get(scope, Pairs()) + pairs

    @property
    def failures(self) -> str:
        """Why versions failed; empty if both completed without errors."""
        sides = zip("AB", self.endings, strict=True)
        failed = [f"{side}: {': '.join(end)}" for side, end in sides if end[0] != Status.OK]
        return "; ".join(failed)

    @property
    def notes(self) -> str:
        """Messages of versions that completed without errors."""
        sides = zip("AB", self.endings, strict=True)
        return "; ".join(f"{side}: {message}" for side, (_, message) in sides if message)
