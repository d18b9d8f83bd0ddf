"""What is compared and how, and the block times that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nanolib.measurement import Direction, Status, case_name
from nanolib.stats.compare import THRESHOLD, Verdict

CALL = "call"
# The least of which a median has a 95 % interval: from there on a pair of processes is the datum.
ENOUGH_PROCESS_PAIRS = 6


@dataclass(frozen=True)
class Settings:
    """How two versions are compared.

    Attributes:
        threshold: The share from which a change counts.
        budget_s: Seconds for one case, the starting of processes included.
        rel_ci: A case is done when the half-width of its ratio's interval is at most this share.
        direction: Which way the metric is better.
        timeout_s: How long one answer of a version may take.
        pairs: Whether timings are wanted; without them each is called once and its rows count.
        total_s: Seconds for all cases together; None for `budget_s` each.
    """

    threshold: float = THRESHOLD
    budget_s: float = 60.0
    rel_ci: float = 0.01
    direction: Direction = Direction.LOWER
    timeout_s: float = 300.0
    pairs: bool = True
    total_s: float | None = None


@dataclass(frozen=True)
class Task:
    """One thing to compare.

    Attributes:
        experiment: Which notebook; `CALL` for a function.
        case_id: The case.
        factors: What the case is.
        requests: What to ask A and B.
    """

    experiment: str
    case_id: str
    factors: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], Mapping[str, Any]]

    @property
    def case(self) -> str:
        """The case, for people."""
        return case_name(self.factors)


@dataclass
class Pairs:
    """Blocks of A and B in pairs.

    Attributes:
        a: Block times of A, ms.
        b: Those of B, in the same order.
        generations: How many of them are of each pair of processes, in that order.
    """

    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(self.a + other.a, self.b + other.b, self.generations + other.generations)

    @property
    def by_process(self) -> bool:
        """Whether there are so many pairs of processes that each is one datum."""
        return len(self.generations) >= ENOUGH_PROCESS_PAIRS

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """What a verdict rests on, A and B: a median ratio for each pair of processes, or the blocks where these are few."""
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
    """What one task gave.

    Attributes:
        blocks: Scope → its pairs.
        rows: The rows that each version made by itself.
        endings: Status and message of each.
    """

    blocks: dict[str, Pairs] = field(default_factory=dict)
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ((), ())
    endings: tuple[tuple[str, str], tuple[str, str]] = ((Status.OK, ""), (Status.OK, ""))

    @property
    def fine(self) -> bool:
        """Whether both sides ended well."""
        return not self.failures

    @property
    def failures(self) -> str:
        """Why sides did not end well; empty when both did."""
        sides = zip("AB", self.endings, strict=True)
        return "; ".join(
            f"{side}: {status}: {said}" for side, (status, said) in sides if status != Status.OK
        )


@dataclass(frozen=True)
class Compared:
    """One task's outcome.

    Attributes:
        task: What was compared.
        result: What came of it.
        verdicts: Scope → verdict; a scope with too few pairs has none.
    """

    task: Task
    result: TaskResult
    verdicts: dict[str, Verdict]


def device_of(task: Task) -> str:
    """What a task runs on; of a function, what it may use, found without importing torch, which takes seconds."""
    return str(task.factors.get("device", "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"))
