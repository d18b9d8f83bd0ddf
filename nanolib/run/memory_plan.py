"""Plan the memory of a case on tensors without data, measure the memory, and write a trace."""

import contextlib
import gc
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanolib.measurement import Measurement, MemoryKind, Status, Unsupported, one_line
from nanolib.meters.memory import (
    LiveBytes,
    free_bytes,
    measure_memory,
    resident_row,
)
from nanolib.meters.memory_breakdown import MemoryBreakdown, MemoryTracker, Part
from nanolib.meters.operations import write_trace
from nanolib.numbers import MIB
from nanolib.paths import make_folder, output_folder
from nanolib.run.case import Case, Params, Plan
from nanolib.run.outcome import PredictedOutOfMemory
from nanolib.torch_internals import describe_plan_failure, fake_tensors

UNCOUNTED = "the memory counter cannot track a compiled kernel"
_PLANS: dict[str, Plan] = {}
_LOW = 2  # The smallest stack of blocks has a first and a last block.
# nanolib plans calls at this batch size. A large prime divides only the bytes of tensors that
# grow with the batch, and nanolib scales these bytes. The bytes of an even larger batch overflow.
FOLLOWED_BATCH = 100_003


@dataclass(eq=False)
class Workload:
    """One call of a case.

    Attributes:
        scope: Scope of the rows.
        call: Function whose memory nanolib plans and measures.
        existing: Function that returns the tensors from before the call.
    """

    scope: str
    call: Callable[[], object]
    existing: Callable[[], Iterable[torch.Tensor]] = tuple

    def first(self) -> None:
        """Create the tensors that a first call leaves behind, such as a cache."""


def plan_case(case: Case, workloads: Callable[[], Iterable[Workload]]) -> Plan:
    """Plan the peak memory of a case on tensors without data, once per process and `case_id`.

    `workloads` is a function that builds the models, inputs and workloads of the case.
    """
    if case.case_id not in _PLANS:
        try:
            with fake_tensors():
                plan = Plan({work.scope: _peak(work) for work in workloads()})
        except Unsupported as error:
            plan = Plan(unsupported_reason=one_line(error))
        except Exception as error:  # Only a run can show whether the case works.
            plan = Plan(reason=f"not planned: {describe_plan_failure(error)}")
        _PLANS[case.case_id] = plan
    return _PLANS[case.case_id]


def _peak(work: Workload) -> int:
    """Return the peak of the live bytes during a call that follows the first call."""
    work.first()
    with LiveBytes() as counter:
        counter.watch(*work.existing())
        work.call()
    return counter.peak


class StackMemory:
    """Planned memory breakdowns of the calls of a model with equal blocks.

    A call has three sections per block: the block's forward pass, the work until the next block,
    and the block's backward pass. Each further block adds the same amount to the peak of a section.
    The peaks of stacks of two and three blocks therefore give the peaks at any depth. The largest
    peak is the call's peak.

    Args:
        depth: Number of blocks, or 0 if the model has no known stack of blocks.
        make_step: Function that maps a number of blocks to the `Step` of a model without data.

    Attributes:
        splits_attention: Whether attention computes all scores, without a fused kernel.
    """

    def __init__(self, depth: int, make_step: Callable[[int], Any]):
        lows = [depth] if depth <= _LOW + 1 else [_LOW, _LOW + 1]
        self._more = depth - _LOW
        self._stacks = [_followed_calls(make_step(low), low) for low in lows]
        trackers = self._stacks[0].values()
        # torch uses the safe softmax only if it splits attention into matrix products.
        self.splits_attention = any("aten::_safe_softmax" in each.operations for each in trackers)

    def breakdowns(self, batch: int) -> dict[str, list[MemoryBreakdown]]:
        """Return the memory breakdown at the peak of each section, by scope of the call.

        Args:
            batch: Batch size. The recorded calls have the batch size `FOLLOWED_BATCH`.
        """
        found = {}
        for scope in self._stacks[0]:
            trackers = [calls[scope] for calls in self._stacks]
            sections, *higher = (
                tracker.breakdowns([bytes_at(batch, size) for size in tracker.sizes])
                for tracker in trackers
            )
            for stack in higher:
                sections = {
                    section: low.extrapolate(stack[section], self._more)
                    for section, low in sections.items()
                }
            found[scope] = [*sections.values()]
        return found


def bytes_at(batch: int, size: int) -> int:
    """Scale a tensor's bytes from the batch size `FOLLOWED_BATCH` to another batch size."""
    return size if size % FOLLOWED_BATCH else size // FOLLOWED_BATCH * batch


def _followed_calls(step, depth: int) -> dict[str, MemoryTracker]:
    """Track the memory of each call of a model with `depth` blocks, by scope."""
    lists = (part for part in step.model.modules() if isinstance(part, nn.ModuleList))
    stacks = [part for part in lists if len(part) == depth]
    found = {}
    for work in step.workloads():
        work.first()
        found[work.scope] = track_memory(work, stacks)
    return found


def track_memory(work, stacks: Iterable[nn.ModuleList] = ()) -> MemoryTracker:
    """Track the memory of a call.

    Args:
        work: `Step` to track.
        stacks: Stacks whose blocks divide the call into sections.
    """
    with (
        MemoryTracker(work.model) as counter,
        counter.follow_modules(),
        contextlib.ExitStack() as hooks,
    ):
        for number, stack in enumerate(stacks):
            for block, place in zip(stack, (*range(len(stack) - 1), "last"), strict=True):
                _mark(counter, block, (number, place), hooks)
        for kind, tensors in work.kinds().items():
            counter.track_existing(kind, tensors, work.owners())
        counter.begin("call")  # The section before the call has exactly the existing tensors.
        work.call()
        for kind, tensors in work.kinds().items():
            counter.mark_results(kind, tensors)
    return counter


def _mark(
    counter: MemoryTracker, block: nn.Module, place: tuple[int, Any], hooks: contextlib.ExitStack
):
    """Begin a section before a block, after the block, and before its backward pass."""

    def forward(section: str):
        is_backward = counter.section is not None and counter.section[0] == "backward"
        if not is_backward:  # In a backward pass, checkpointing computes the block again.
            counter.begin((section, *place))

    def made(_module, _inputs, out):
        forward("after")
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(lambda _: counter.begin(("backward", *place)))

    hooks.callback(block.register_forward_pre_hook(lambda *_: forward("forward")).remove)
    hooks.callback(block.register_forward_hook(made).remove)


def shortage(needed: int | None, device: str) -> str:
    """Return an error if the planned bytes exceed the free memory, otherwise an empty string."""
    free = free_bytes(device)
    # The system needs a tenth of the free memory.
    if free is None or needed is None or needed <= 0.9 * free:
        return ""
    return (
        f"the case needs {needed / MIB:,.0f} MiB, over 90% of the {free / MIB:,.0f} MiB free; "
        "give shorter or fewer sequences, or fewer layers"
    )


def check_case(case: Case) -> None:
    """Check that a case can run on this machine.

    Raises:
        Unsupported: This machine cannot run the case.
        PredictedOutOfMemory: The plan of the case exceeds the free memory.
    """
    if reason := case.unsupported_reason() or case.plan().unsupported_reason:
        raise Unsupported(reason)
    if reason := shortage(case.plan().most, case.device):
        raise PredictedOutOfMemory(reason)


def memory_rows(work: Workload, device: str, plan: Plan, counted: bool = True) -> list[Measurement]:
    """Measure the peak memory of a call on its device, with the planned peak as the prediction.

    `counted` is false for calls of compiled kernels, because these kernels bypass the counter.
    """
    if not counted:
        peak = Measurement(
            "peak_memory",
            scope=work.scope,
            status=Status.UNSUPPORTED,
            message=f"{UNCOUNTED}; see resident_memory",
        )
        return [peak, resident_row(work.call, work.scope)]
    work.first()  # The plan assumes a first call too.
    return measure_memory(
        work.call,
        device=device,
        existing=tuple(work.existing()),
        scope=work.scope,
        predicted_bytes=plan.peaks.get(work.scope),
    )


def breakdown_rows(work, device: str, plan: Plan) -> list[Measurement]:
    """Measure the peak memory of a call, and the memory use of each part of the model.

    On a GPU, the allocator reports the peak. Memory beyond live tensors is `unattributed`.

    Args:
        work: `Step` to measure.
        device: Device on which the call computes.
        plan: Plan of the case.

    Returns:
        Rows of `peak_memory`, and of `reserved_memory` or `resident_memory`, in MiB. The details of
        `peak_memory` have the bytes of each part, which add up to the peak.
    """
    work.first()  # The plan assumes a first call too.
    gc.collect()
    counter = track_memory(work)
    breakdown = max(counter.breakdowns().values(), key=lambda section: section.peak)
    peak, *others = memory_rows(work, device, plan)
    # The allocator of a GPU may use more memory than the live tensors.
    beyond = round(peak.estimate * MIB) - breakdown.peak
    parts = breakdown.parts | ({Part(MemoryKind.UNATTRIBUTED): beyond} if beyond > 0 else {})
    largest = sorted(parts.items(), key=lambda item: -item[1])
    peak.details["parts"] = [[*part, size] for part, size in largest]
    return [peak, *others]


def trace(work: Workload, case: Case, params: Params) -> None:
    """Write a Chrome trace of one call into the folder `traces` if `params.trace` is set."""
    if not params.trace:
        return
    text = f"{params.NAME} {str(case)[:90]} {work.scope} {case.case_id[:6]}"
    file = re.sub(r"[^A-Za-z0-9=.,+-]+", "-", text) + ".json"
    write_trace(work.call, make_folder(output_folder() / "traces") / file, case.device)
