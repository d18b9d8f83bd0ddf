"""Measure the peak rates of a device, and compute the roofline and MFU from these rates.

The first cases of a run measure the peak rates, or copy the rates from another run of the same
command.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from nanolib.measurement import Measurement
from nanolib.meters.ceilings import measure_ceiling, rate
from nanolib.models import fp8
from nanolib.run.case import Case, Ceilings
from nanolib.stats.intervals import Interval
from nanolib.store import Store

# nanolib times a peak rate for longer than a latency, because predictions use the peak rate.
_LONGER = 4


@dataclass(frozen=True)
class CeilingCase(Case):
    """The peak rate of a device for copies, or for matrix products in a dtype, `tf32` or `fp8`."""

    supports_ab: ClassVar[bool] = False  # A peak rate belongs to the machine, not to the code.

    ceiling: str
    budget_s: float

    @property
    def factors(self) -> dict[str, Any]:
        """The factors that define the case. A longer budget measures the same rate."""
        return {"device": self.device, "ceiling": self.ceiling}

    def unsupported(self) -> str:
        """Return why the device cannot compute the matrix product, or an empty string."""
        return no_product(self.ceiling, self.device)

    def measure(self, params: Any, ceilings: Ceilings) -> Iterator[Measurement]:
        """Measure the peak rate with `measure_ceiling`."""
        yield measure_ceiling(self.device, self.ceiling, self.budget_s)

    def __str__(self) -> str:
        """Return `ceiling` and the name of the rate."""
        return f"ceiling {self.ceiling}"


def no_product(kind: str, device: str) -> str:
    """Return why a device has no matrix product in `tf32` or `fp8`, or an empty string."""
    if kind == "fp8":
        return fp8.native(device)
    is_new = device.startswith("cuda") and torch.cuda.get_device_capability(device) >= (8, 0)
    if kind != "tf32" or is_new:
        return ""
    return f"{device} has no tf32; use an NVIDIA GPU of compute capability 8.0 or higher"


def ceiling_cases(device: str, dtypes: list[str], budget_s: float) -> list[Case]:
    """Make a case for the matrix product in each dtype, and a case for copies."""
    return [CeilingCase(device, name, min(_LONGER * budget_s, 2.0)) for name in (*dtypes, "copy")]


def ceilings_of(store: Store, run_or_machine: str) -> Ceilings:
    """Return the newest peak rates of a run or a machine: dtype → FLOP/s, and `copy` → B/s.

    If a rate has no interval, both ends of the interval are the estimate.

    Args:
        store: Database of the runs.
        run_or_machine: `run_id` of the run or `machine_id` of the machine.
    """
    query = (
        "SELECT scope, coalesce(low, estimate), estimate, coalesce(high, estimate)"
        " FROM runs JOIN measurements USING (run_id)"
        " WHERE ? IN (run_id, machine_id) AND estimate > 0"
        " AND metric LIKE 'ceiling%' ORDER BY started, id"
    )
    found = store.connection.execute(query, (run_or_machine,))
    return {scope: Interval(*ends) for scope, *ends in found}


def measured_before(case: Case, store: Store, run_id: str) -> list[Measurement]:
    """Return the row of a peak rate that another run of the same command has measured.

    All notebooks of a command use the same peak rates, although each notebook has its own run.

    Args:
        case: Case to measure.
        store: Database of the runs.
        run_id: ID of the case's run.

    Returns:
        One row. The list is empty if no other run has measured the rate, or if the case does not
        measure a peak rate.
    """
    query = (
        "SELECT results.* FROM runs own, runs other JOIN results ON results.run_id = other.run_id"
        " WHERE own.run_id = ? AND case_id = ? AND metric LIKE 'ceiling%' AND estimate > 0"
        " AND own.machine_id = other.machine_id AND instr(own.launch, '/')"
        " AND other.launch LIKE substr(own.launch, 1, instr(own.launch, '/')) || '%'"
        " ORDER BY id LIMIT 1"
    )
    for row in store.read(query, (run_id, case.case_id)).to_dict("records"):
        row["message"] += f"; measured by run {row['run_id'][:8]} of the same command"
        return [Measurement(**{field.name: row[field.name] for field in fields(Measurement)})]
    return []


def roofline_ms(flops: float, bytes_moved: float, dtype: str, ceilings: Ceilings) -> float | None:
    """Return the shortest time of a call at the peak rates, ms, or None if a rate is missing.

    Args:
        flops: FLOPs of one call.
        bytes_moved: Bytes that one call must read and write at least once.
        dtype: Dtype of the matrix products, a key of `ceilings`.
        ceilings: Peak rates: dtype → FLOP/s, and `copy` → B/s.

    Source: Williams, Waterman & Patterson (2009), the roofline model.
    """
    if dtype not in ceilings or "copy" not in ceilings:
        return None
    compute_s = flops / ceilings[dtype].estimate
    copy_s = bytes_moved / ceilings["copy"].estimate
    return 1e3 * max(compute_s, copy_s)


def rate_rows(
    latency: Measurement, flops: float, dtype: str, ceilings: Ceilings
) -> Iterator[Measurement]:
    """Yield the row `flops_per_second`, and the row `mfu` if the dtype's peak rate is known.

    The interval of `mfu` is the widest that the intervals of the latency and the peak rate allow.
    """
    yield rate("flops_per_second", flops, latency)
    if dtype in ceilings:
        least, ceiling, most = ceilings[dtype]
        share = rate("mfu", flops / ceiling, latency)
        low = None if share.low is None else share.low * ceiling / most
        high = None if share.high is None else share.high * ceiling / least
        message = f"of {ceiling:.3g} [{least:.3g} … {most:.3g}] FLOP/s"
        yield replace(share, low=low, high=high, message=message)
