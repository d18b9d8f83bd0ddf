"""The machine's ceilings, measured: the rate of a large matrix product per dtype, and of a large copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from nanolib import onednn
from nanolib.measurement import Measurement
from nanolib.meters.time.latency import measure

_MATRIX = {"cpu": 1536, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}  # far beyond the last cache
_COPY_ELSEWHERE = 2**29


def measure_ceilings(
    device: str, dtypes: Sequence[str], rel_ci: float = 0.02, budget_s: float = 2.0, copy: bool = True
) -> Iterator[Measurement]:
    """What this device reaches at best: the yardstick for every share.

    Args:
        device: Where.
        dtypes: For which dtypes to time a matrix product.
        rel_ci: As in `measure`.
        budget_s: As in `measure`, for each ceiling.
        copy: Whether to time a copy too.

    Yields:
        `ceiling_flops` (FLOP/s, the dtype in `scope`; of torch's own product too, where another is faster) and `ceiling_bytes`
        (B/s, read and written, scope `copy`).
    """
    kind = torch.device(device).type
    for dtype in dtypes:
        size = _size(kind, dtype)
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        torchs, *others = _products(a, b, rel_ci, budget_s)
        best = max((torchs, *others), key=lambda found: found.estimate)
        yield best
        if best is not torchs:
            yield replace(torchs, scope=f"{dtype} by torch")
    if not copy:
        return
    source = torch.empty(_COPY_BYTES.get(kind, _COPY_ELSEWHERE), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    time = measure(lambda: target.copy_(source), rel_ci, budget_s, device=device)
    yield rate("ceiling_bytes", 2 * source.nbytes, time, scope="copy", message=f"copy of {source.nbytes // 2**20} MiB")


def operand_bytes(device: str, ceiling: str) -> int:
    """What measuring one ceiling holds at the most: a dtype's two operands, drawn in float32, and their product; or a copy."""
    kind = torch.device(device).type
    if ceiling == "copy":
        return 2 * _COPY_BYTES.get(kind, _COPY_ELSEWHERE)
    return _size(kind, ceiling) ** 2 * (3 * getattr(torch, ceiling).itemsize + torch.float32.itemsize)


def _size(kind: str, dtype: str) -> int:
    size = _MATRIX.get(kind, 4096)
    # many CPUs emulate the short types, a hundred times slower
    return size // 2 if kind == "cpu" and dtype not in ("float32", "float64") else size


def _products(a: torch.Tensor, b: torch.Tensor, rel_ci: float, budget_s: float) -> Iterator[Measurement]:
    """The rate of a · b, by torch and, in float32 on a CPU, by oneDNN, which has AVX-512 where torch's MKL has none."""
    out, size = torch.empty_like(a), a.shape[0]
    calls = {"": lambda: torch.mm(a, b, out=out)}
    if a.device.type == "cpu" and a.dtype == torch.float32:
        calls[", by oneDNN"] = lambda: onednn.linear(a, b)
    for by, call in calls.items():
        time = measure(call, rel_ci, budget_s, device=str(a.device))
        scope = str(a.dtype).removeprefix("torch.")
        yield rate("ceiling_flops", 2 * size**3, time, scope=scope, message=f"matrix product {size}³{by}")


def rate(metric: str, amount: float, latency: Measurement, *, scope: str = "", message: str = "") -> Measurement:
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
