"""Define the settings and tasks of a comparison, and store the block times."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from nanolib.measurement import Status
from nanolib.stats.compare import THRESHOLD, Verdict

CALL = "call"
Request = Mapping[str, Any]  # A request to a process. The key `do` of a request names the action.
# A median needs at least six samples for a 95 % interval. With at least six pairs of processes,
# each pair of processes counts as one sample.
ENOUGH_PROCESS_PAIRS = 6


@dataclass(frozen=True)
class Settings:
    """The settings of a comparison.

    Attributes:
        threshold: Smallest change that counts as a regression or an improvement, as a fraction.
        budget_s: Time limit for one case, including process start-up, s.
        total_s: Time limit for all cases together, s.
    """

    threshold: float = THRESHOLD
    budget_s: float = 60.0
    total_s: float = math.inf


@dataclass(frozen=True)
class Task:
    """One case or function to compare.

    Attributes:
        experiment: Name of the case's notebook, or `CALL` for a function.
        case_id: ID of the case in the database, or the name of the function.
        factors: Names and values of the factors that define the case.
        request: The request that starts the case in A and in B.
    """

    experiment: str
    case_id: str
    factors: Mapping[str, Any]
    request: Request

    @property
    def device(self) -> str:
        """Return the device of the case, or the device that a function may use.

        For a function, nanolib looks for the device file of the NVIDIA driver. An import of torch
        would take seconds.
        """
        default = "cuda:0" if Path("/dev/nvidia0").exists() else "cpu"
        return str(self.factors.get("device", default))


@dataclass
class Pairs:
    """Median times of the blocks of A and B. A block of A and a block of B form a pair.

    Attributes:
        a: Median times of A's blocks, ms, shape [pairs].
        b: Median times of B's blocks, ms, in the same order.
        generations: Number of block pairs that each pair of processes measured, in the same order.
    """

    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)

    def __add__(self, other: Self) -> Self:
        return Pairs(self.a + other.a, self.b + other.b, self.generations + other.generations)

    @property
    def counts_processes(self) -> bool:
        """Whether there are enough pairs of processes to count each such pair as one sample."""
        return len(self.generations) >= ENOUGH_PROCESS_PAIRS

    @property
    def ratios(self) -> np.ndarray:
        """Return the median ratio of B to A in each pair of processes."""
        parts = np.split(np.divide(self.b, self.a), np.cumsum(self.generations)[:-1])
        return np.array([np.median(part) for part in parts])

    def agree(self, threshold: float) -> bool:
        """Return whether a change of all pairs together is more than chance in one process.

        With few pairs of processes, each ratio must exceed the threshold in the same direction.

        Args:
            threshold: Smallest change that counts, as a fraction.
        """
        ratios = self.ratios
        return self.counts_processes or max(min(ratios), 1 / max(ratios)) > 1 + threshold

    def __str__(self) -> str:
        """Return the numbers of block pairs and process pairs as text."""
        return f"{len(self.a)} pairs in {len(self.generations)} pairs of processes"


@dataclass
class TaskResult:
    """The results of a task. Each pair of processes adds pairs of blocks to the results.

    Attributes:
        task: The task that was compared.
        blocks: Pairs of blocks of each scope.
        rows: Rows of A and rows of B, from the last pair of processes.
        endings: Status and message of A and of B, from the last pair of processes.
        verdicts: Verdict of each scope. A scope with too few pairs has no verdict.
    """

    task: Task
    blocks: dict[str, Pairs] = field(default_factory=dict)
    rows: list[list[dict[str, Any]]] = field(default_factory=lambda: [[], []])
    endings: list[tuple[str, str]] = field(default_factory=lambda: [(Status.OK, "")] * 2)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def add(self, blocks: Mapping[str, Pairs]) -> None:
        """Add the blocks that another pair of processes measured."""
        for scope, pairs in blocks.items():
            self.blocks[scope] = self.blocks.get(scope, Pairs()) + pairs

    @property
    def failures(self) -> str:
        """Return why versions failed, or an empty text if both completed without errors."""
        sides = zip("AB", self.endings, strict=True)
        return "; ".join(f"{side}: {': '.join(end)}" for side, end in sides if end[0] != Status.OK)

    @property
    def notes(self) -> str:
        """Return the messages of versions that completed without errors."""
        sides = zip("AB", self.endings, strict=True)
        return "; ".join(f"{side}: {message}" for side, (_, message) in sides if message)
