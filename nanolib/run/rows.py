"""Rows of several experiments: memory, compiling, a mean over seeds; and a profiler's trace."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from nanolib.measurement import Measurement, MemoryKind, Status, Unsupported, exact
from nanolib.meters.layers.operations import write_trace
from nanolib.meters.memory import MIB, measure_memory, resident_row
from nanolib.meters.memory_breakdown import MemoryBreakdown
from nanolib.meters.time.call_check import CallCheck
from nanolib.paths import make_folder, output_folder
from nanolib.run.case import Case, Plan
from nanolib.run.memory_plan import Workload, followed
from nanolib.run.params import Params
from nanolib.stats.intervals import mean_interval

UNCOUNTED = "a compiled kernel allocates out of the counter's sight"


def memory_rows(work: Workload, device: str, plan: Plan, counted: bool = True) -> list[Measurement]:
    """Measure the peak memory of one call, next to its plan.

    Args:
        work: Which call.
        device: Where it computes.
        plan: Of the peak.
        counted: Whether a counter sees its tensors; a compiled kernel's it does not see.
    """
    if not counted:
        message = f"{UNCOUNTED}; see resident_memory"
        refused = {"status": Status.UNSUPPORTED, "message": message}
        return [
            Measurement("peak_memory", scope=work.scope, **refused),
            resident_row(work.call, work.scope),
        ]
    work.first()  # counted from where the plan was
    existing, predicted = tuple(work.existing()), plan.peaks.get(work.scope)
    return measure_memory(
        work.call, device=device, existing=existing, scope=work.scope, predicted_bytes=predicted
    )


def breakdown_rows(
    work: Workload, model: nn.Module, device: str, plan: Plan, planned: MemoryBreakdown | None
) -> list[Measurement]:
    """Measure the peak of one call by kind of memory; the kinds add up to it.

    On a GPU the peak is the allocator's, and its memory beyond the live tensors is a kind of its
    own, `unattributed`.

    Args:
        work: Its tensors are known by kind.
        model: Its modules are named.
        device: Where it computes.
        plan: Of the peak.
        planned: The planned breakdown; None if there is none.

    Returns:
        `peak_memory`, with its parts and the peak of each phase (bytes) in its details;
        `reserved_memory` or `resident_memory`; and `memory_part` by kind, MiB.
    """
    work.first()  # counted from where the plan was
    gc.collect()
    counter = followed(work, model)
    breakdowns = counter.breakdowns()
    breakdown = max(breakdowns.values(), key=lambda each: each.peak)
    details = {
        "parts": [[*part, size] for part, size in breakdown.largest(len(breakdown.parts))],
        "phases": {phase: each.peak for phase, each in breakdowns.items() if phase is not None},
    }
    planned_kinds = planned.by_kind if planned else {}
    kinds = dict.fromkeys(planned_kinds, 0) | breakdown.by_kind
    if device.startswith("cuda"):
        peak, *others = memory_rows(work, device, plan)
        kinds[MemoryKind.UNATTRIBUTED] = max(0, round(peak.estimate * MIB) - breakdown.peak)
        peak.details.update(details)
    else:
        predicted = plan.peaks.get(work.scope)
        peak = exact(
            "peak_memory",
            breakdown.peak / MIB,
            predicted=None if predicted is None else predicted / MIB,
            scope=work.scope,
            method="live_tensor_bytes",
            details={"before": counter.existing / MIB} | details,
        )
        work.first()
        others = [resident_row(work.call, work.scope)]
    parts = []
    for kind, size in kinds.items():
        expected = (
            planned_kinds.get(kind, 0) / MIB
            if planned_kinds and kind != MemoryKind.UNATTRIBUTED
            else None
        )
        scope = f"{work.scope}: {kind}"
        parts.append(
            exact("memory_part", size / MIB, scope=scope, method=peak.method, predicted=expected)
        )
    return [peak, *others, *parts]


def unattributed_rows(work: Workload, device: str, plan: Plan) -> list[Measurement]:
    """Measure the memory of a call whose tensors no counter sees, as one part."""
    refused, resident = memory_rows(work, device, plan, counted=False)
    part = Measurement(
        "memory_part",
        resident.estimate,
        scope=f"{work.scope}: {MemoryKind.UNATTRIBUTED}",
        message=f"{UNCOUNTED}, so its parts are not known",
        n=resident.n,
        method=resident.method,
        status=resident.status,
    )
    return [refused, resident, part]


def timed_call_ms(call: Callable[[], object]) -> float:
    """Time one call, ms, compiling included if it is the first.

    Raises:
        Unsupported: The call only begins its work, or torch gives up compiling it.
    """
    checked, start = CallCheck(call, "call", Unsupported), time.perf_counter()
    checked()
    return (time.perf_counter() - start) * 1e3


def compile_row(first_ms: float, later_ms: float) -> Measurement:
    """Return the time of compiling."""
    compile_ms, method = max(0.0, first_ms - later_ms), "first call less a later one"
    return Measurement("latency", compile_ms, n=1, method=method, scope="compile")


def over_seeds(
    metric: str, values: Sequence[float], scope: str = "", paired: bool = False, **rest: Any
) -> Measurement:
    """Return the mean over seeds, with Student's interval.

    Args:
        metric: What the values are.
        values: One per seed, at least two.
        scope: Of what.
        paired: Whether each is a difference between two runs of one seed.
        rest: More of the row.
    """
    low, mean, high = mean_interval(values)
    method = "paired by seed, Student's interval" if paired else "mean over seeds"
    rest = {"method": method, "scope": scope, "n": len(values), "samples": tuple(values)} | rest
    return Measurement(metric, mean, low, high, 0.95, **rest)


def trace(work: Workload, case: Case, params: Params) -> None:
    """Write the profiler's trace of one call into the folder `traces`, if `params.trace` is set."""
    if not params.trace:
        return
    name, scope = (
        re.sub(r"[^A-Za-z0-9=.,+-]+", "-", text) for text in (f"{params.NAME} {case}", work.scope)
    )
    folder = make_folder(output_folder() / "traces")
    file = f"{name[:100].strip('-')}-{scope}-{case.case_id[:6]}.json"
    write_trace(work.call, folder / file, case.device)
