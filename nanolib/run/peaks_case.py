"""The machine's peak rates as the first cases of a run, and what rests on them.

Every share is of a rate that this run, or another of the same command, has measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from nanolib.measurement import Measurement
from nanolib.meters.ceilings import measure_ceiling, operand_bytes, rate
from nanolib.models import fp8
from nanolib.run.case import Case, Plan
from nanolib.store import Store

METRICS_OF_CEILINGS = ("ceiling_flops", "ceiling_bytes")
_LONGER = 4  # than another timing: every share and prediction rests on it


class Ceiling(float):
    """A measured peak rate, FLOP/s or B/s, with the ends of its interval.

    Attributes:
        low: Lower end; the rate itself if there is none.
        high: Upper end.

    Example:
        >>> Ceiling.of(1e11, 1.1e11, 1.2e11).high
        120000000000.0
    """

    low: float
    high: float

    @classmethod
    def of(cls, low: float | None, estimate: float, high: float | None) -> Self:
        """Make it from an estimate and the ends of its interval."""
        made = cls(estimate)
        made.low = estimate if low is None else low
        made.high = estimate if high is None else high
        return made


@dataclass(frozen=True)
class CeilingCase(Case):
    """A peak of one device: the matrix product of a dtype, `tf32` or `fp8`, or a `copy`."""

    supports_ab: ClassVar[bool] = False  # a peak is the machine's, not the code's

    ceiling: str
    budget_s: float

    def unsupported(self) -> str:
        """Return why the device has no such product."""
        return no_product(self.ceiling, self.device)

    def plan(self) -> Plan:
        """Count its operands."""
        return Plan({"ceiling": operand_bytes(self.device, self.ceiling)})

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """See `measure_ceiling`."""
        yield measure_ceiling(self.device, self.ceiling, self.budget_s)

    def __str__(self) -> str:
        """Name what is measured."""
        return f"ceiling {self.ceiling}"


@dataclass(frozen=True)
class SustainedCase(CeilingCase):
    """The same product after the device has been at it for half of `budget_s`."""

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """See `measure_ceiling`."""
        yield measure_ceiling(self.device, self.ceiling, self.budget_s, sustained=True)

    def __str__(self) -> str:
        """Name what is measured."""
        return f"ceiling {self.ceiling} sustained"


def no_product(kind: str, device: str) -> str:
    """Return why a device has no tf32 or no FP8; empty if it has, and for torch's own types."""
    if kind == "fp8":
        return fp8.native(device)
    is_new = device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 0)
    if kind != "tf32" or is_new:
        return ""
    return f"{device} has no tf32; NVIDIA GPUs from compute capability 8.0 have"


def ceiling_cases(device: str, dtypes: list[str], budget_s: float) -> list[Case]:
    """Make one case per dtype and one for the copy, each at most 2 s."""
    return [CeilingCase(device, name, min(_LONGER * budget_s, 2.0)) for name in (*dtypes, "copy")]


def ceilings_of(store: Store, run_or_machine: str) -> dict[str, float]:
    """Return the newest peaks of a run or a machine: dtype → FLOP/s, and `copy` → B/s.

    Args:
        store: Where they are.
        run_or_machine: Its `run_id` or `machine_id`.
    """
    query = (
        "SELECT scope, low, estimate, high FROM results WHERE ? IN (run_id, machine_id)"
        " AND estimate > 0 AND metric IN ('ceiling_flops', 'ceiling_bytes') ORDER BY id"
    )
    found = store.connection.execute(query, (run_or_machine,))
    return {scope: Ceiling.of(*ends) for scope, *ends in found}


def measured_before(case: Case, store: Store, run_id: str) -> list[Measurement]:
    """Return a peak rate that another notebook of the same command has measured here.

    So all notebooks of a command use the same peak rates, although each is a run of its own.

    Args:
        case: Any; empty if it is not a peak rate.
        store: Where the runs are.
        run_id: The run that would measure it.
    """
    run = store.runs_of([run_id]).iloc[0]
    command = run.launch.partition("/")[0]
    if type(case) is not CeilingCase or not command:
        return []
    of_command = "launch || '/' LIKE ? AND machine_id = ? AND device = ? AND run_id != ?"
    others = store.runs(of_command, (f"{command}/%", run.machine_id, run.device, run_id))
    rows = store.measurements(list(others.run_id), samples=True)
    is_peak = rows["metric"].isin(METRICS_OF_CEILINGS) & rows["estimate"].notna()
    for row in rows[is_peak & (rows["scope"] == case.ceiling)].to_dict("records"):
        row["message"] += f"; measured by run {row['run_id'][:8]} of the same command"
        return [Measurement(**{field.name: row[field.name] for field in fields(Measurement)})]
    return []


def roofline_ms(
    flops: float, bytes_moved: float, dtype: str, ceilings: dict[str, float]
) -> float | None:
    """The least time that the measured ceilings allow, ms; None while they are not known.

    Args:
        flops: Work of one call.
        bytes_moved: Bytes that must be read and written at least once.
        dtype: Whose matrix product bounds the work.
        ceilings: FLOP/s per dtype, B/s under `copy`.

    Source: Williams, Waterman & Patterson (2009), the roofline model.
    """
    if dtype not in ceilings or "copy" not in ceilings:
        return None
    return 1e3 * max(flops / ceilings[dtype], bytes_moved / ceilings["copy"])


def rate_rows(
    latency: Measurement, flops: float, dtype: str, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    """`flops_per_second`, and `mfu` where the ceiling is known, of one latency.

    The share's interval is the widest that the latency's and the ceiling's allow.
    """
    yield rate("flops_per_second", flops, latency)
    if dtype in ceilings:
        ceiling = ceilings[dtype]
        share = rate("mfu", flops / ceiling, latency)
        low = None if share.low is None else share.low * ceiling / ceiling.high
        high = None if share.high is None else share.high * ceiling / ceiling.low
        said = f"of {ceiling:.3g} [{ceiling.low:.3g} … {ceiling.high:.3g}] FLOP/s"
        yield replace(share, low=low, high=high, message=said)
