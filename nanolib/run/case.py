"""A case: one point of a grid that predicts itself, plans its memory, and measures itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from nanolib.measurement import Measurement
from nanolib.meters.memory import MIB
from nanolib.meters.time.sampler import Timing

# Yields rows and requests for timings; each request is answered with the timing's rows by scope.
Measuring = Generator[Measurement | Timing, dict[str, Measurement] | None, None]


@dataclass(frozen=True)
class Plan:
    """The memory that a case will need.

    Attributes:
        peaks: Scope → peak live bytes.
        reason: Why there are none, in one line.
        unsupported: Why the case cannot run at all, if building it shows that.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    unsupported: str = ""

    @property
    def most(self) -> int | None:
        """The largest peak of all scopes, bytes; None without a plan."""
        return max(self.peaks.values(), default=None)


@dataclass(frozen=True)
class Case:
    """One point of the grid; its fields are the factors, JSON types only.

    Attributes:
        supports_ab: Whether `nano ab` can interleave its timings with another version's.
        device: Where it runs.
    """

    supports_ab: ClassVar[bool] = True

    device: str

    def unsupported(self) -> str:
        """Return why this machine cannot run it; empty if no reason is known before a run."""
        return ""

    def plan(self) -> Plan:
        """Return the memory that it will need, without running it."""
        return Plan()

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Return what formulas predict, and after `bytes` the planned `peak_memory` (MiB).

        Args:
            ceilings: As `roofline_ms` takes them; without them no time is predicted.
        """
        predicted: dict[str, float | str] = {}
        for name, value in self.formulas(ceilings).items():
            predicted[name] = value
            if name == "bytes" and (planned := self.plan().most) is not None:
                predicted["peak_memory"] = planned / MIB
        return predicted

    def formulas(self, ceilings: dict[str, float] | None = None) -> dict[str, Any]:
        """Return what formulas predict; empty if none applies."""
        return {}

    def measure(self, params: Any, ceilings: dict[str, float]) -> Measuring:
        """Measure it, row by row.

        The case yields a `Timing` for each latency that is ranked with those of other cases, and
        receives its rows by scope.

        Args:
            params: Those of its notebook.
            ceilings: The peak rates that this run has measured, as `roofline_ms` takes them.
        """
        raise NotImplementedError

    @property
    def group(self) -> str:
        """The group whose latencies are ranked and so timed in turns; empty for none."""
        return ""

    @property
    def title(self) -> str:
        """Its name in the rows of other cases of the group."""
        return str(self)

    @property
    def is_baseline(self) -> bool:
        """Whether the other cases of its group are compared with it."""
        return False

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that it needs for itself."""
        return (self.device,)

    @property
    def runs_code(self) -> bool:
        """Whether building it runs code of the user's, which only a run may do."""
        return False

    @property
    def factors(self) -> dict[str, Any]:
        """Name → value of what defines the case, as stored."""
        return asdict(self)

    @property
    def case_id(self) -> str:
        """Sixteen hexadecimal digits that depend only on the case's class and factors."""
        text = json.dumps([type(self).__name__, self.factors], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """The factors that a progress bar shows."""
        shown = (getattr(self, f.name) for f in fields(self) if f.name != "device")
        return " ".join(_brief(value) for value in shown if value not in ({}, "", None))


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return str(value)
