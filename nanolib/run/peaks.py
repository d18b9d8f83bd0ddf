"""Measure the peak rates of a device, and compute the roofline and MFU from these rates.

A peak rate is that of a large matrix product in a dtype, or of a large copy. The first cases of a
run measure the peak rates, or copy the rates from another run of the same command.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch

from nanolib.measurement import Measurement
from nanolib.meters.latency import measure
from nanolib.models import fp8
from nanolib.numbers import MIB
from nanolib.run.case import Case, Ceilings
from nanolib.stats.intervals import Interval
from nanolib.store import Store

_MATRIX = {"cpu": 1536, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # A copy must not fit into the last-level cache.
# The names `tf32` and `fp8` are not dtypes of torch, so nanolib maps them to operand dtypes.
PRODUCTS = {"tf32": "float32", "fp8": "float8_e4m3fn"}
_REL_CI = 0.02


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

    def unsupported_reason(self) -> str:
        """Return why the device cannot compute the matrix product, or an empty string."""
        return no_product(self.ceiling, self.device)

    def measure(self, params, ceilings: Ceilings) -> Iterator[Measurement]:
        """Yield the peak rate, with its name as the scope.

        For a product, the row is `ceiling_flops` in FLOP/s. For a copy, the row is `ceiling_bytes`,
        which are the bytes read and written per second.
        """
        if self.ceiling == "copy":
            size = _COPY_BYTES.get(torch.device(self.device).type, 2**29)
            source = torch.empty(size, dtype=torch.uint8, device=self.device).fill_(1)
            latency = self._time(partial(torch.empty_like(source).copy_, source))
            yield rate("ceiling_bytes", 2 * size, latency, message=f"copy of {size // MIB} MiB")
            return
        product = _product(self.device, self.ceiling)
        with tf32_products(self.ceiling == "tf32"):
            latency = self._time(product)
        size = len(product.args[0])
        message = f"matrix product {size}³, in a burst of {self.budget_s:g} s"
        yield rate("ceiling_flops", 2 * size**3, latency, message=message)

    def _time(self, call: Callable[[], object]) -> Measurement:
        return measure(call, _REL_CI, self.budget_s, device=self.device, scope=self.ceiling)

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
    # nanolib times a peak rate for longer than a latency, because predictions use the peak rate.
    return [CeilingCase(device, name, min(4 * budget_s, 2.0)) for name in (*dtypes, "copy")]


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
        yield replace(
            share,
            low=low,
            high=high,
            message=f"of {ceiling:.3g} [{least:.3g} … {most:.3g}] FLOP/s",
        )


def _product(device: str, ceiling: str) -> partial[torch.Tensor]:
    """Return a function that multiplies its two positional arguments, which are square matrices."""
    kind = torch.device(device).type
    size = _MATRIX.get(kind, 4096)
    if kind == "cpu" and ceiling not in ("float32", "float64"):
        size //= 2  # Many CPUs emulate 16-bit and 8-bit dtypes a hundred times slower.
    dtype = getattr(torch, PRODUCTS.get(ceiling, ceiling))
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # Linear layers multiply by a transposed weight. In another layout, FP8 kernels fail, and 16-bit
    # products on many CPUs are ten times slower.
    b = b.t()
    if ceiling != "fp8":
        return partial(torch.mm, a, b, out=torch.empty_like(a))
    one = torch.ones((), device=device)
    return partial(
        torch._scaled_mm,
        a,
        b,
        scale_a=one,
        scale_b=one,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,  # torchao's forward product uses it too.
    )


@contextlib.contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """Choose whether float32 products on a GPU use tf32 within the context.

    Args:
        wanted: Whether products use tf32.
    """
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def rate(metric: str, amount: float, latency: Measurement, *, message: str = "") -> Measurement:
    """Convert a latency to a rate with an interval, and keep the flags of the latency.

    Args:
        metric: Metric of the row, such as `flops_per_second`.
        amount: Number of FLOPs, bytes or tokens of one call.
        latency: The `latency` row of one call, ms.
        message: Message of the row.
    """
    per_second = 1e3 * amount
    low, high = (per_second / end if end else None for end in (latency.high, latency.low))
    return replace(
        latency,
        metric=metric,
        estimate=per_second / latency.estimate,
        low=low,
        high=high,
        samples=tuple(per_second / sample for sample in latency.samples),
        predicted=None,
        method=f"amount/{latency.method}",
        message=message,
        details={},
    )
