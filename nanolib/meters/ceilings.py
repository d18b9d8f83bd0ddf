"""Measure the machine's peak rates with a large matrix product per dtype, and with a large copy."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from nanolib.measurement import Measurement
from nanolib.meters.latency import measure

_MATRIX = {"cpu": 1536, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # A copy must not fit into the last-level cache.
# The names `tf32` and `fp8` are not dtypes of torch, so nanolib maps them to operand dtypes.
PRODUCTS = {"tf32": "float32", "fp8": "float8_e4m3fn"}
_REL_CI = 0.02


def measure_ceiling(device: str, ceiling: str, budget_s: float = 2.0) -> Measurement:
    """Measure a peak rate of a device, for comparison with achieved rates.

    Args:
        device: Device to measure.
        ceiling: Name of the peak rate: `copy` for a copy in memory, or a dtype, `tf32` or `fp8` for
            a matrix product.
        budget_s: Time after which sampling stops, s.

    Returns:
        For a product, a row of `ceiling_flops` in FLOP/s. For a copy, a row of `ceiling_bytes`,
        which are the bytes read and written per second. The scope is the name of the rate.
    """
    how = {"device": device, "scope": ceiling}
    if ceiling == "copy":
        size = _COPY_BYTES.get(torch.device(device).type, 2**29)
        source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
        latency = measure(partial(torch.empty_like(source).copy_, source), _REL_CI, budget_s, **how)
        return rate("ceiling_bytes", 2 * size, latency, message=f"copy of {size // 2**20} MiB")
    product = _product(device, ceiling)
    with tf32_products(ceiling == "tf32"):
        latency = measure(product, _REL_CI, budget_s, **how)
    size = len(product.args[0])
    text = f"matrix product {size}³, in a burst of {budget_s:g} s"
    return rate("ceiling_flops", 2 * size**3, latency, message=text)


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
    # torchao's forward product uses fast accumulation, so the peak rate uses it too.
    rest = {"scale_a": one, "scale_b": one, "use_fast_accum": True}
    return partial(torch._scaled_mm, a, b, out_dtype=torch.bfloat16, **rest)


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
