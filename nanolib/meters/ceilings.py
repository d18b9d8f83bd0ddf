"""The machine's ceilings, measured: the rate of a large matrix product per dtype, and of a large copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from nanolib.measurement import Measurement
from nanolib.meters.time.clock import Clock
from nanolib.meters.time.latency import measure

_MATRIX = {"cpu": 1536, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # far beyond the last cache
_COPY_ELSEWHERE = 2**29
# Ways to multiply that are no type of torch's: the type of the operands as they are drawn or kept.
PRODUCTS = {"tf32": "float32", "fp8": "float8_e4m3fn"}
_REL_CI = 0.02
_SUSTAINED_CALLS = 4


def measure_ceiling(device: str, ceiling: str, budget_s: float = 2.0) -> Measurement:
    """What this device reaches at best: the yardstick for every share.

    Args:
        device: Where.
        ceiling: Of which matrix product, by its dtype, or `tf32` or `fp8` where the device has them; or `copy`.
        budget_s: As in `measure`.

    Returns:
        `ceiling_flops` (FLOP/s, the dtype in `scope`); or `ceiling_bytes` (B/s, read and written, scope `copy`).
    """
    if ceiling != "copy":
        a, b = _operands(device, ceiling)
        with tf32_products(ceiling == "tf32"):
            latency = measure(_product(a, b, ceiling), _REL_CI, budget_s, device=device)
        size = a.shape[0]
        text = f"matrix product {size}³, in a burst of {budget_s:g} s"
        return rate("ceiling_flops", 2 * size**3, latency, scope=ceiling, message=text)
    size = _COPY_BYTES.get(torch.device(device).type, _COPY_ELSEWHERE)
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    latency = measure(lambda: target.copy_(source), _REL_CI, budget_s, device=device)
    return rate(
        "ceiling_bytes", 2 * size, latency, scope="copy", message=f"copy of {size // 2**20} MiB"
    )


def operand_bytes(device: str, ceiling: str) -> int:
    """What measuring one ceiling holds at the most: a dtype's two operands, drawn in float32, and their product; or a copy."""
    kind = torch.device(device).type
    if ceiling == "copy":
        return 2 * _COPY_BYTES.get(kind, _COPY_ELSEWHERE)
    itemsize = getattr(torch, PRODUCTS.get(ceiling, ceiling)).itemsize
    return _size(kind, ceiling) ** 2 * (3 * itemsize + torch.float32.itemsize)


def measure_sustained(device: str, dtype: str, seconds: float) -> Measurement:
    """What a matrix product reaches when the device has been at it for a while: the second half of so many seconds.

    Args:
        device: Where.
        dtype: Of the product, as in `measure_ceiling`.
        seconds: How long; its first half is heard and not counted.

    Returns:
        `ceiling_flops`, FLOP/s, scope `DTYPE sustained`.
    """
    a, b = _operands(device, dtype)
    with tf32_products(dtype == "tf32"):
        latency = measure(_product(a, b, dtype), 0.01, seconds, device=device, collect=_second_half)
    text = f"matrix product {a.shape[0]}³, the second half of {seconds:g} s"
    return rate(
        "ceiling_flops", 2 * a.shape[0] ** 3, latency, scope=f"{dtype} sustained", message=text
    )


def _second_half(
    clock: Clock, phases: Mapping[str, Callable[[], object]], rel_ci: float, budget_s: float
) -> tuple[np.ndarray, dict[str, Any]]:
    """Blocks over a time; a `Collect`."""
    start, calls, blocks = time.perf_counter(), list(phases.values()), []
    while time.perf_counter() - start < budget_s or len(blocks) < 12:
        blocks.append(clock.time_block(calls, _SUSTAINED_CALLS, 1))
    shape = {
        "calls_per_block": _SUSTAINED_CALLS,
        "inner": 1,
        "stop": "second_half",
        "budget_s": budget_s,
    }
    return np.asarray(blocks[len(blocks) // 2 :]), shape


@contextlib.contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """Products of float32 in tf32 on a GPU, or exactly."""
    products = (
        torch.backends.cuda.matmul
    )  # by the name that stays: where it was used, the older one raises
    before, products.fp32_precision = products.fp32_precision, "tf32" if wanted else "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def _operands(device: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = _size(torch.device(device).type, dtype)
    a, b = (
        torch.randn(size, size, device=device).to(getattr(torch, PRODUCTS.get(dtype, dtype)))
        for _ in range(2)
    )
    return (a, b.t().contiguous().t()) if dtype == "fp8" else (a, b)  # whose kernels take columns


def _product(a: torch.Tensor, b: torch.Tensor, dtype: str) -> Callable[[], object]:
    if dtype == "fp8":
        one = torch.ones((), device=a.device)
        # as torchao's forward product adds up: without it the ceiling would be below what that product reaches
        return lambda: torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _size(kind: str, dtype: str) -> int:
    size = _MATRIX.get(kind, 4096)
    # many CPUs emulate the short types, a hundred times slower
    return size // 2 if kind == "cpu" and dtype not in ("float32", "float64") else size


def rate(
    metric: str, amount: float, latency: Measurement, *, scope: str = "", message: str = ""
) -> Measurement:
    """Amount / latency per second, with the interval and labels of the latency it came from.

    Args:
        metric: What the rate is, such as `flops_per_second`.
        amount: FLOPs, bytes or tokens of one call.
        latency: The `latency` of one call, ms.
        scope: Of what; the latency's when empty.
        message: How, in one line.
    """
    per_second = 1e3 * amount
    return Measurement(
        metric,
        per_second / latency.estimate,
        None if latency.high is None else per_second / latency.high,
        None if latency.low is None else per_second / latency.low,
        latency.confidence,
        n=latency.n,
        samples=tuple(per_second / sample for sample in latency.samples),
        method=f"amount/{latency.method}",
        scope=scope or latency.scope,
        message=message,
        flags=latency.flags,
    )
