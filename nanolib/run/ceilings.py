"""The machine's ceilings as the first cases of a run: every share is of a ceiling that this run, or one beside it, measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from nanolib.measurement import Flag, Measurement, Status
from nanolib.meters.ceilings import measure_ceiling, measure_sustained, operand_bytes, rate
from nanolib.models import fp8
from nanolib.run.case import Case, Plan
from nanolib.store import Store

METRICS_OF_CEILINGS = ("ceiling_flops", "ceiling_bytes")
_LONGER = 4  # than another timing: each is measured once per command, and every share and prediction rests on it


class Ceiling(float):
    """A measured ceiling, FLOP/s or B/s, with the ends of its interval; those of a plain number are that number.

    Attributes:
        low: Lower end.
        high: Upper end.

    Example:
        >>> Ceiling.of([1e11, 1.1e11, 1.2e11]).high
        120000000000.0
    """

    low: float
    high: float

    @classmethod
    def of(cls, ends: float | Sequence[float | None]) -> Self:
        """From `(low, estimate, high)`, or a number."""
        if isinstance(ends, Ceiling):
            ends = ends.ends
        low, value, high = ends if isinstance(ends, Sequence) else (ends, ends, ends)
        made = cls(value)
        made.low, made.high = (float(value if end is None else end) for end in (low, high))
        return made

    @property
    def ends(self) -> list[float]:
        """`[low, estimate, high]`, from which `of` makes it again."""
        return [self.low, float(self), self.high]


@dataclass(frozen=True)
class CeilingCase(Case):
    """A ceiling of one device: the matrix product of a dtype, `tf32` or `fp8`, or (`copy`) its memory."""

    interleaves: ClassVar[bool] = False  # a ceiling is the machine's, not the code's

    ceiling: str
    budget_s: float

    def unsupported(self) -> str:
        """Why the device has no such product."""
        return no_product(self.ceiling, self.device)

    def plan(self) -> Plan:
        """Its operands."""
        return Plan({"ceiling": operand_bytes(self.device, self.ceiling)})

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """See `measure_ceiling`."""
        yield measure_ceiling(self.device, self.ceiling, self.budget_s)

    def __str__(self) -> str:
        """What is measured."""
        return f"ceiling {self.ceiling}"


@dataclass(frozen=True)
class SustainedCase(CeilingCase):
    """The same product after the device has been at it for half of `budget_s`."""

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """See `measure_sustained`."""
        yield measure_sustained(self.device, self.ceiling, self.budget_s)

    def __str__(self) -> str:
        """What is measured."""
        return f"ceiling {self.ceiling} sustained"


def no_product(kind: str, device: str) -> str:
    """Why a device has no tf32 or no 8 bits; empty where it has, and for torch's own types."""
    if kind == "fp8":
        return fp8.native(device)
    if kind != "tf32":
        return ""
    if not device.startswith("cuda"):
        return f"{device} has no tf32; NVIDIA GPUs from compute capability 8.0 have"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU has no tf32; those from compute capability 8.0 have"
    return ""


def ceiling_cases(device: str, dtypes: list[str], budget_s: float) -> list[Case]:
    """One case per dtype and one for the copy, each at most 2 s."""
    return [CeilingCase(device, name, min(_LONGER * budget_s, 2.0)) for name in (*dtypes, "copy")]


def ceilings_of(store: Store, run_id: str) -> dict[str, float]:
    """The ceilings that a run has measured: dtype → FLOP/s, and `copy` → B/s, each a `Ceiling`."""
    query = (
        "SELECT scope, low, estimate, high FROM measurements WHERE run_id = ?"
        " AND estimate IS NOT NULL AND metric IN ('ceiling_flops', 'ceiling_bytes')"
    )
    return {scope: Ceiling.of(ends) for scope, *ends in store.connection.execute(query, (run_id,))}


def measured_before(case: Case, store: Store, run_id: str) -> list[Measurement]:
    """What another notebook of the same command has measured of a ceiling here; nothing for any other case.

    So one command has one yardstick, though its notebooks are runs of their own.

    Args:
        case: Any.
        store: Where the runs are.
        run_id: That which would measure it.
    """
    if type(case) is not CeilingCase or not (run := store.runs_of([run_id]).iloc[0]).launch:
        return []
    beside = "substr(launch || '/', 1, instr(launch || '/', '/')) = ? AND machine_id = ? AND device = ? AND run_id != ?"
    command = run.launch.partition("/")[0] + "/"
    others = store.runs(beside, (command, run.machine_id, run.device, run_id))
    rows = store.measurements(list(others.run_id), samples=True)
    if "factor.ceiling" not in rows:
        return []
    rows = rows[
        rows["metric"].isin(METRICS_OF_CEILINGS)
        & (rows["factor.ceiling"] == case.ceiling)
        & rows["estimate"].notna()
    ]
    first = rows[rows["run_id"] == rows["run_id"].iloc[0]] if len(rows) else rows
    return [
        Measurement(
            row.metric,
            row.estimate,
            row.low,
            row.high,
            row.confidence,
            row.n,
            tuple(row.samples),
            method=row.method,
            scope=row.scope,
            status=Status(row.status),
            message=f"{row.message}; measured by run {row.run_id[:8]} of the same command",
            flags=tuple(map(Flag, row.flags)),
            details=row.details,
        )
        for row in first.itertuples()
    ]


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
    """`flops_per_second`, and `ceiling_share` where the ceiling is known, of one latency.

    The share's interval is the widest that the latency's and the ceiling's allow.
    """
    yield rate("flops_per_second", flops, latency)
    if dtype in ceilings:
        ceiling = Ceiling.of(ceilings[dtype])
        share = rate("ceiling_share", flops / ceiling, latency)
        low = None if share.low is None else share.low * ceiling / ceiling.high
        high = None if share.high is None else share.high * ceiling / ceiling.low
        said = f"of {ceiling:.3g} [{ceiling.low:.3g} … {ceiling.high:.3g}] FLOP/s"
        yield replace(share, low=low, high=high, message=said)
