"""Memory: live tensor bytes as they are born and die, the resident set as the kernel sees it, CUDA's own counters."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanolib.measurement import Measurement, Status, exact
from nanolib.meters.limits import memory_limits
from nanolib.meters.workspace import workspace_bytes

MIB = 2**20
_WORKSPACE = -1  # a key that no storage has
_PROC = Path("/proc/self")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage that an operation returns, from its birth to its death.

    Deterministic, so a test can pin it; slow, so it never runs inside a timing. Buffers that a kernel allocates and frees within
    one operation are not seen, but for those that `workspace_bytes` knows.

    Attributes:
        current: Bytes alive now, of those born since the mode was entered and those given to `watch`.
        peak: The most that were alive at once.
    """

    supports_higher_order_operators = (
        True  # FlexAttention is one operation, and returns its results like another
    )

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def watch(self, *tensors: torch.Tensor) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            self._born(tensor)

    def _born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return

        def died(_: Any) -> None:
            del self._alive[key]
            self._count(key, -size)

        self._alive[key] = weakref.ref(storage, died)
        self._count(key, size)

    def _count(self, key: int, size: int) -> None:
        """A storage is born, or has died where its size is below zero."""
        self.current += size
        self.peak = max(self.peak, self.current)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count what it returns, unless that lies in what it was given: a view, or a result in place."""
        if (
            func is torch.ops.prim.device.default
        ):  # fake tensors ask it of each other twice as often as they compute
            return func(*args)
        given = {
            x.untyped_storage()._cdata
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self._born(leaf)
        if workspace := workspace_bytes(func, args):  # alive for a moment, beside the results
            self._count(_WORKSPACE, workspace)
            self._count(_WORKSPACE, -workspace)
        return out


@dataclass
class Peak:
    """Bytes: alive before, of these the case's own, kept by the allocator before, and the most; None where it cannot be told."""

    before: int = 0
    existing: int = 0
    kept: int = 0
    live: int | None = None
    reserved: int | None = None
    resident: int | None = None
    resident_message: str = ""
    method: str = "live_tensor_bytes"

    @property
    def own(self) -> int:
        """The live peak of the case's own tensors: on a GPU others are alive, and counted, too."""
        return self.live - self.before + self.existing

    @property
    def own_reserved(self) -> int | None:
        """The same of what the allocator keeps: beside what it kept for others, which graphs never give back."""
        return None if self.reserved is None else self.reserved - self.kept + self.existing


@contextmanager
def peak_memory(device: str | torch.device = "cpu", *existing: torch.Tensor) -> Iterator[Peak]:
    """Record the peak memory of the block.

    Args:
        device: Where the tensors live.
        existing: Tensors that count although they were there before (weights, inputs); CUDA counts all anyway.

    Yields:
        A `Peak`, filled when the block ends, however it does.
    """
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in existing}
    peak = Peak(existing=sum(storages.values()))
    gc.collect()
    if torch.device(device).type == "cuda":
        peak.method = "cuda_allocator"
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what earlier cases have left in the allocator's cache is no part of this one's reserve
        torch.cuda.reset_peak_memory_stats(device)
        peak.before, peak.kept = (
            torch.cuda.memory_allocated(device),
            torch.cuda.memory_reserved(device),
        )
        try:
            yield peak
        finally:
            torch.cuda.synchronize(device)
            peak.live, peak.reserved = (
                torch.cuda.max_memory_allocated(device),
                torch.cuda.max_memory_reserved(device),
            )
        return
    counter = LiveBytes()
    try:
        with counter:
            counter.watch(*existing)
            peak.before = counter.current
            yield peak
    finally:
        peak.live = counter.peak


def fake_tensors() -> FakeTensorMode:
    """Within it tensors have shapes, types and devices and no data: whatever runs costs time and no memory.

    Tensors of one such block are strangers in another, so a block within one goes on with it.
    """
    return detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)


def why_not_planned(error: BaseException) -> str:
    """Why tensors without data did not tell, in one line."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"what it does depends on its data, which a plan does not have ({error.func}); run it to know"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def free_bytes(device: str | torch.device = "cpu") -> int | None:
    """Memory that a new tensor could take now; None where the device does not tell.

    On the host it is the least of what the system has to give and what this process's control groups have left.
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
    """Record how far the resident set rises above its start (Linux: `clear_refs` and `VmHWM`)."""
    peak = Peak()
    try:
        (_PROC / "clear_refs").write_text("5")
        peak.before = _status_kib("VmRSS") * 1024
    except OSError as error:
        peak.resident_message = (
            f"the kernel does not tell the resident peak here ({error.strerror}, {sys.platform})"
        )
    try:
        yield peak
    finally:
        if not peak.resident_message:
            peak.resident = max(0, _status_kib("VmHWM") * 1024 - peak.before)


def _status_kib(field: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise OSError(0, f"no {field} in /proc/self/status")


def measure_memory(
    fn: Callable[[], object],
    *,
    device: str | torch.device = "cpu",
    existing: tuple[torch.Tensor, ...] = (),
    scope: str = "",
    predicted_bytes: float | None = None,
) -> list[Measurement]:
    """Peak memory of one call, outside any timing.

    Args:
        fn: What to call.
        device: Where it computes.
        existing: Tensors that were there before and count.
        scope: What the rows say was measured.
        predicted_bytes: What a formula says of the live peak.

    Returns:
        `peak_memory` of `existing` and of what the call makes, and `reserved_memory` (CUDA) or `resident_memory` (CPU), MiB. What
        else was alive is in the details, as part of `before`.
    """
    predicted = None if predicted_bytes is None else predicted_bytes / MIB
    with peak_memory(device, *existing) as live:
        fn()
    said = {"scope": scope, "method": live.method, "details": {"before": live.before / MIB}}
    peak = exact("peak_memory", live.own / MIB, predicted=predicted, **said)
    if live.own_reserved is not None:
        return [peak, exact("reserved_memory", live.own_reserved / MIB, **said)]
    return [peak, resident_row(fn, scope)]


def resident_row(fn: Callable[[], object], scope: str = "") -> Measurement:
    """How far the resident set rises in one call, MiB: one reading of a quantity that varies, so no interval."""
    with resident_peak() as resident:
        fn()
    if resident.resident is None:
        message = resident.resident_message
        return Measurement(
            "resident_memory", scope=scope, status=Status.UNSUPPORTED, message=message
        )
    return Measurement(
        "resident_memory",
        resident.resident / MIB,
        n=1,
        samples=(resident.resident / MIB,),
        method="clear_refs+VmHWM",
        scope=scope,
        details={"before": resident.before / MIB},
    )
