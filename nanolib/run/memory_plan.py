"""The calls of a case: the memory that is planned without data and measured, and a trace."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from nanolib.measurement import Measurement, MemoryKind, Status, Unsupported, exact
from nanolib.meters.layers.operations import write_trace
from nanolib.meters.memory import (
    MIB,
    LiveBytes,
    fake_tensors,
    free_bytes,
    measure_memory,
    resident_row,
    why_not_planned,
)
from nanolib.meters.memory_breakdown import MemoryBreakdown, MemoryTracker
from nanolib.paths import make_folder, output_folder
from nanolib.run.case import Case, Plan
from nanolib.run.params import Params
from nanolib.run.timeout import one_line

UNCOUNTED = "a compiled kernel allocates out of the counter's sight"

_HEADROOM = 0.9  # of the free memory: the process and the system need some
_PLANS: dict[str, Plan] = {}
_LOW = 2  # blocks: a first one and a last one


@dataclass
class Workload:
    """One call of a case.

    Attributes:
        scope: The scope of its rows.
        call: What is called.
        existing: Returns earlier tensors that count too: weights, inputs, the optimizer's states;
            by default those of `kinds`.
        first: Leaves the tensors that a first call leaves for later calls: the optimizer's states,
            a cache.
        kinds: Returns the same tensors by use: a `MemoryKind` → tensors.
        phases: The parts of the call, in order, if it has parts.
        owners: Returns the `id` of an optimizer's state → the weight that it belongs to.
    """

    scope: str
    call: Callable[[], object]
    existing: Callable[[], Iterable[torch.Tensor]] = tuple
    first: Callable[[], object] = lambda: None
    kinds: Callable[[], Mapping[str, Iterable[torch.Tensor]]] | None = None
    phases: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    owners: Callable[[], Mapping[int, torch.Tensor]] = dict

    def __post_init__(self) -> None:
        if kinds := self.kinds:
            self.existing = lambda: [tensor for tensors in kinds().values() for tensor in tensors]


def planned(case: Case, workloads: Callable[[], Iterable[Workload]]) -> Plan:
    """Count the peak memory of a case on tensors that have shapes and no data, once per process.

    Args:
        case: Any; its id is the key.
        workloads: Builds the case's workloads with models and inputs, on tensors without data.
    """
    if case.case_id not in _PLANS:
        try:
            with fake_tensors():
                plan = Plan({work.scope: _peak(work) for work in workloads()})
        except Unsupported as error:
            plan = Plan(reason=one_line(error), unsupported=one_line(error))
        except Exception as error:  # the case decides by running
            plan = Plan(reason=f"not planned: {why_not_planned(error)}")
        _PLANS[case.case_id] = plan
    return _PLANS[case.case_id]


def _peak(work: Workload) -> int:
    """Count the bytes at the peak of a later call."""
    work.first()
    with LiveBytes() as counter:
        counter.watch(*work.existing())
        work.call()
    return counter.peak


class StackMemory:
    """The memory of the calls of a stack of equal blocks, counted without any data.

    A call has sections: before each block, in it, after it, and its backward pass. With each more
    block, the peak of a section grows by the same amount of weights, gradients, states, caches and
    activations. So it follows from a stack of two blocks and one of three. The call's peak is the
    largest of all sections, which may be another section in a high stack than in a low one.

    Args:
        depth: Number of blocks; 0 if the stack is not known.
        ats: Functions of the number of blocks that return a `Step`, one for each followed shape.
    """

    def __init__(self, depth: int, *ats: Callable[[int], Any]) -> None:
        lows = [depth] if depth <= _LOW + 1 else [_LOW, _LOW + 1]
        self._more = depth - _LOW
        with fake_tensors():
            self._stacks = [[_followed_calls(at, low) for at in ats] for low in lows]

    def breakdowns(
        self,
        shared: Callable[[MemoryBreakdown], MemoryBreakdown] = lambda whole: whole,
        resized: Callable[..., int] = int,
    ) -> dict[str, MemoryBreakdown]:
        """Return the memory at each scope's peak.

        Args:
            shared: Returns the part of one rank, if several ranks share the memory.
            resized: Maps the bytes of a tensor in each followed shape to those in another shape.
        """
        found = {}
        for scope in self._stacks[0][0]:
            sections, *higher = (_by_section(scope, shapes, resized) for shapes in self._stacks)
            for stack in higher:
                sections = {
                    section: low.extrapolate(stack[section], self._more)
                    for section, low in sections.items()
                }
            found[scope] = max(map(shared, sections.values()), key=lambda each: each.peak)
        return found


def _by_section(
    scope: str, shapes: list[dict[str, MemoryTracker]], resized: Callable[..., int]
) -> dict[Any, MemoryBreakdown]:
    trackers = [calls[scope] for calls in shapes]
    sizes = zip(*(tracker.sizes for tracker in trackers), strict=True)
    return trackers[0].breakdowns([resized(*of_tensor) for of_tensor in sizes])


def _followed_calls(at: Callable[[int], Any], depth: int) -> dict[str, MemoryTracker]:
    """Follow the calls of a stack of `depth` blocks, by scope."""
    step = at(depth)
    lists = (part for part in step.model.modules() if isinstance(part, nn.ModuleList))
    stacks = [part for part in lists if len(part) == depth]
    found = {}
    for work in step.workloads():
        work.first()
        found[work.scope] = followed(work, step.model, stacks)
    return found


def followed(
    work: Workload, model: nn.Module, stacks: Iterable[nn.ModuleList] | None = None
) -> MemoryTracker:
    """Count one call by its phases, or by the sections that begin with each block of `stacks`."""
    phases = (work.phases or {work.scope: work.call}) if stacks is None else {None: work.call}
    with MemoryTracker(model) as counter, counter.follow_modules(), contextlib.ExitStack() as hooks:
        for number, stack in enumerate(stacks or ()):
            for block, place in zip(stack, (*range(len(stack) - 1), "last"), strict=True):
                _mark(counter, block, (number, place), hooks)
        for kind, tensors in work.kinds().items():
            counter.track_existing(kind, tensors, work.owners())
        for phase, call in phases.items():
            if phase is not None:
                counter.begin(phase)
            call()
        for kind, tensors in work.kinds().items():
            counter.mark_results(kind, tensors)
    return counter


def _mark(
    counter: MemoryTracker, block: nn.Module, place: tuple[int, Any], hooks: contextlib.ExitStack
) -> None:
    """Begin a section with a block, after it, and with its backward pass."""

    def forward(section: str) -> None:
        is_backward = counter.section is not None and counter.section[0] == "backward"
        if not is_backward:  # otherwise the block is computed again, for its gradient
            counter.begin((section, *place))

    def made(module: nn.Module, inputs: object, out: Any) -> None:
        forward("after")
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(lambda _: counter.begin(("backward", *place)))

    hooks.callback(block.register_forward_pre_hook(lambda *_: forward("forward")).remove)
    hooks.callback(block.register_forward_hook(made).remove)


def shortage(plan: Plan, device: str) -> str:
    """Return why the case exceeds the free memory; empty if it fits, or its plan is not known."""
    free = free_bytes(device)
    if free is None or plan.most is None or plan.most <= _HEADROOM * free:
        return ""
    return (
        f"it needs {plan.most / MIB:,.0f} MiB and {free / MIB:,.0f} MiB are free; "
        "shorten it, or give fewer sequences or layers"
    )


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
        peak = Measurement("peak_memory", scope=work.scope, **refused)
        return [peak, resident_row(work.call, work.scope)]
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
    if device.startswith("cuda"):
        peak, *others = memory_rows(work, device, plan)
    else:  # the tracker has counted it
        predicted = plan.peaks.get(work.scope)
        peak = exact(
            "peak_memory",
            breakdown.peak / MIB,
            predicted=None if predicted is None else predicted / MIB,
            scope=work.scope,
            method="live_tensor_bytes",
            details={"before": counter.existing / MIB},
        )
        work.first()
        others = [resident_row(work.call, work.scope)]
    parts = [[*part, size] for part, size in breakdown.largest(len(breakdown.parts))]
    phases = {phase: each.peak for phase, each in breakdowns.items() if phase is not None}
    peak.details.update(parts=parts, phases=phases)
    known = planned.by_kind if planned else {}
    kinds = dict.fromkeys(known, 0) | breakdown.by_kind
    expected = {kind: known.get(kind, 0) / MIB for kind in kinds} if planned else {}
    if device.startswith("cuda"):
        kinds[MemoryKind.UNATTRIBUTED] = max(0, round(peak.estimate * MIB) - breakdown.peak)
    rows = [peak, *others]
    for kind, size in kinds.items():
        made = {"scope": f"{work.scope}: {kind}", "method": peak.method}
        rows.append(exact("memory_part", size / MIB, predicted=expected.get(kind), **made))
    return rows


def unattributed_rows(work: Workload, device: str, plan: Plan) -> list[Measurement]:
    """Measure the memory of a call whose tensors no counter sees, as one part."""
    refused, resident = memory_rows(work, device, plan, counted=False)
    scope = f"{work.scope}: {MemoryKind.UNATTRIBUTED}"
    message = f"{UNCOUNTED}, so its parts are not known"
    part = replace(resident, metric="memory_part", scope=scope, message=message)
    return [refused, resident, part]


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
