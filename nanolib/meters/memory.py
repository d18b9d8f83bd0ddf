"""Measure memory: live tensor bytes, the resident set of the process, and CUDA's counters."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from nanolib.measurement import Measurement, Status, cause, exact
from nanolib.meters.clock import Device
from nanolib.meters.machine import memory_limits
from nanolib.meters.tensor_bytes import LiveBytes
from nanolib.numbers import MIB
from nanolib.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    detect_fake_mode,
)

_PROC = Path("/proc/self")


@dataclass
class Peak:
    """Peak memory of a section of code, in bytes. An unknown value is None.

    Attributes:
        before: Live bytes at the start of the section, or the resident set in `resident_peak`.
        existing: Bytes of tensors from before the section that count toward the peak.
        reserved_before: Bytes that the CUDA allocator had reserved at the start of the section.
        live: Peak of live bytes, including `before`.
        reserved: Peak of the bytes that the CUDA allocator reserved.
        resident: Increase of the resident set of the process.
        resident_message: Reason why `resident` is not known.
        method: Method of the rows.
    """

    before: int = 0
    existing: int = 0
    reserved_before: int = 0
    live: int | None = None
    reserved: int | None = None
    resident: int | None = None
    resident_message: str = ""
    method: str = "live_tensor_bytes"

    @property
    def own_bytes(self) -> int:
        """Peak of live bytes, without the earlier tensors that do not count."""
        return self.live - self.before + self.existing


@contextmanager
def peak_memory(device: Device = "cpu", *existing: torch.Tensor) -> Iterator[Peak]:
    """Record the peak memory within the context.

    Args:
        device: Device of the tensors.
        existing: Earlier tensors that count toward the peak, such as weights and inputs.

    Yields:
        A `Peak`. The values are complete when the context ends, even after an exception.
    """
    counter, on_gpu = LiveBytes(), torch.device(device).type == "cuda"
    counter.watch(*existing)
    peak = Peak(before=counter.current, existing=counter.current)
    gc.collect()
    if on_gpu:
        peak.method = "cuda_allocator"
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # Cached memory of earlier cases must not count.
        torch.cuda.reset_peak_memory_stats(device)
        peak.before = torch.cuda.memory_allocated(device)
        peak.reserved_before = torch.cuda.memory_reserved(device)
    try:
        with nullcontext() if on_gpu else counter:
            yield peak
    finally:
        peak.live = counter.peak
        if on_gpu:
            torch.cuda.synchronize(device)
            peak.live = torch.cuda.max_memory_allocated(device)
            peak.reserved = torch.cuda.max_memory_reserved(device)


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which tensors have shape, dtype and device but no data.

    torch cannot mix tensors of two modes, so nested contexts use the same mode.
    """
    return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


def describe_plan_failure(error: BaseException) -> str:
    """Describe in one line why a plan on fake tensors failed."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return (
            f"the work depends on data, but a plan has no data ({error.func}); run the work instead"
        )
    return cause(error)


def free_bytes(device: Device = "cpu") -> int | None:
    """Return the free memory for new tensors in bytes, or None if unknown.

    On the host, the result is the smallest free memory of the system and of each control group.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    left = [limit - used for limit, used in memory_limits()]
    return max(0, min([psutil.virtual_memory().available, *left]))


@contextmanager
def resident_peak() -> Iterator[Peak]:
    """Record how much the resident set grows within the context, from Linux's counter `VmHWM`."""
    peak = Peak()
    try:
        (_PROC / "clear_refs").write_text("5")
        peak.before = _status_bytes("VmRSS")
    except OSError as error:
        why = f"{error.strerror}, {sys.platform}"
        peak.resident_message = f"the kernel does not report the resident peak ({why})"
    try:
        yield peak
    finally:
        if not peak.resident_message:
            peak.resident = max(0, _status_bytes("VmHWM") - peak.before)


def _status_bytes(field: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(0, f"no {field} in /proc/self/status")


def measure_memory(
    fn: Callable[[], object],
    *,
    device: Device = "cpu",
    existing: tuple[torch.Tensor, ...] = (),
    scope: str = "",
    predicted_bytes: float | None = None,
) -> list[Measurement]:
    """Measure the peak memory of one call, outside any timing.

    Args:
        fn: Function to call.
        device: Device on which the function computes.
        existing: Earlier tensors that count toward the peak, such as weights and inputs.
        scope: Scope of the rows.
        predicted_bytes: Predicted live peak, bytes.

    Returns:
        Two rows in MiB. `peak_memory` includes `existing` and the tensors of the call. The second
        row is `reserved_memory` with CUDA, and `resident_memory` otherwise. The detail `before` is
        the memory use before the call.
    """
    predicted = None if predicted_bytes is None else predicted_bytes / MIB
    with peak_memory(device, *existing) as found:
        fn()
    rest = {"scope": scope, "method": found.method, "details": {"before": found.before / MIB}}
    peak = exact("peak_memory", found.own_bytes / MIB, predicted=predicted, **rest)
    if found.reserved is None:
        return [peak, resident_row(fn, scope)]
    # Memory reserved before the call, such as for CUDA graphs, does not count.
    reserved = found.reserved - found.reserved_before + found.existing
    return [peak, exact("reserved_memory", reserved / MIB, **rest)]


def resident_row(fn: Callable[[], object], scope: str = "") -> Measurement:
    """Measure once how much the resident set grows during a call, MiB, without an interval."""
    with resident_peak() as resident:
        fn()
    if resident.resident is None:
        why = resident.resident_message
        return Measurement("resident_memory", scope=scope, status=Status.UNSUPPORTED, message=why)
    rise = resident.resident / MIB
    return Measurement(
        "resident_memory",
        rise,
        n=1,
        samples=(rise,),
        method="clear_refs+VmHWM",
        scope=scope,
        details={"before": resident.before / MIB},
    )
