"""The machine's ceilings as the first case of a run: every share in the run is of a ceiling measured in that run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from nanolib.measurement import Measurement
from nanolib.meters.ceilings import measure_ceiling, measure_sustained, operand_bytes, rate
from nanolib.models import fp8
from nanolib.run.case import Case, Plan


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
        yield from measure_ceiling(self.device, self.ceiling, self.budget_s)

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
    return [CeilingCase(device, name, min(budget_s, 2.0)) for name in (*dtypes, "copy")]


def roofline_ms(flops: float, bytes_moved: float, dtype: str, ceilings: dict[str, float]) -> float | None:
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


def rate_rows(latency: Measurement, flops: float, dtype: str, ceilings: dict[str, float]) -> Iterator[Measurement]:
    """`flops_per_second`, and `ceiling_share` where the ceiling is known, of one latency.

    The share's interval is that of the latency: the ceiling's own is in its row.
    """
    yield rate("flops_per_second", flops, latency)
    if dtype in ceilings:
        yield rate("ceiling_share", flops / ceilings[dtype], latency, message=f"of {ceilings[dtype]:.3g} FLOP/s")
