"""A case: one point of a grid, which says what formulas know of it, whether it can run here, and measures itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from nanolib.measurement import Measurement
from nanolib.meters.memory import MIB
from nanolib.meters.time.turns import Timing

# Yields rows, and timings that it asks for; a timing is answered with its rows by scope.
Measuring = Generator[Measurement | Timing, dict[str, Measurement] | None, None]


@dataclass(frozen=True)
class Plan:
    """What a case will need.

    Attributes:
        peaks: Scope → peak live bytes.
        reason: Why there are none, in one line.
        unsupported: Why the case cannot run at all, where building it tells.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    unsupported: str = ""

    @property
    def most(self) -> int | None:
        """Bytes, over all scopes; None without a plan."""
        return max(self.peaks.values(), default=None)


@dataclass(frozen=True)
class Case:
    """One point of the grid; its fields are the factors, JSON types only.

    Attributes:
        interleaves: Whether its timings can be interleaved with another version's (`nano ab`).
        device: Where it runs.
    """

    supports_ab: ClassVar[bool] = True

    device: str

    def unsupported(self) -> str:
        """Why this machine cannot run it; empty when it can, as far as can be told without running it."""
        return ""

    def plan(self) -> Plan:
        """The memory that it will need, without running it."""
        return Plan()

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """What formulas say before anything runs, and after `bytes` the `peak_memory` (MiB) where it can be planned.

        Args:
            ceilings: As `roofline_ms` takes them; without them no time is predicted.
        """
        said = self.formulas(ceilings)
        planned = self.plan().most if "bytes" in said else None
        if planned is None:
            return said
        known = list(said.items())
        after = list(said).index("bytes") + 1
        return dict([*known[:after], ("peak_memory", planned / MIB), *known[after:]])

    def formulas(self, ceilings: dict[str, float] | None = None) -> dict[str, Any]:
        """What can be said at once, while a control moves; nothing where no formula knows."""
        return {}

    def measure(self, params: Any, ceilings: dict[str, float]) -> Measuring:
        """Measure it, row by row.

        A timing that is ranked with others is asked for: the case yields a `Timing`, and gets its rows by scope.

        Args:
            params: Those of its notebook.
            ceilings: As `roofline_ms` takes them: those that this run has measured.
        """
        raise NotImplementedError

    @property
    def group(self) -> str:
        """Cases in which this is equal have their latencies ranked with each other, so they are timed in turns; empty for none."""
        return ""

    @property
    def title(self) -> str:
        """What rows of a group call this one of its cases."""
        return str(self)

    @property
    def is_baseline(self) -> bool:
        """Whether the others of its group are compared with it."""
        return False

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that it needs for itself."""
        return (self.device,)

    @property
    def runs_code(self) -> bool:
        """Whether to build what it measures is to run code of the user's, which only a run does."""
        return False

    @property
    def factors(self) -> dict[str, Any]:
        """Name → value of what defines the case, as they are stored."""
        return asdict(self)

    @property
    def case_id(self) -> str:
        """Sixteen hexadecimal digits that depend on the kind of case and its factors alone."""
        text = json.dumps([type(self).__name__, self.factors], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """The factors that are worth a glance in a progress bar."""
        shown = (getattr(self, f.name) for f in fields(self) if f.name != "device")
        return " ".join(_brief(value) for value in shown if value not in ({}, "", None))


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return str(value)
