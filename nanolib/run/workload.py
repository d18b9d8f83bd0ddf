"""What a case runs: each call with the tensors that were there before it, so that its memory can be measured, or planned unrun."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nanolib.measurement import Measurement, Status, Unsupported
from nanolib.meters.holders import Holders, Holding
from nanolib.meters.layers.trace import write_trace
from nanolib.meters.memory import (
    MIB,
    LiveBytes,
    fake_tensors,
    free_bytes,
    measure_memory,
    resident_row,
    why_not_planned,
)
from nanolib.meters.time.call_check import CallCheck
from nanolib.paths import make_folder, output_folder
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.outcome import WillNotFit, one_line
from nanolib.run.params import Params


@dataclass(frozen=True)
class Workload:
    """One call of a case.

    Attributes:
        scope: What its rows say was measured.
        call: What is called.
        existing: Gives the tensors that count although they were there before: weights, inputs, the optimizer's states.
        first: Leaves behind what a first call does and later calls find: the optimizer's states, a cache.
        kinds: The same tensors by what they are: a `Held` → tensors.
        phases: What the call does in turn, where it has parts.
        owners: The `id` of an optimizer's state → the weight that it belongs to.
    """

    scope: str
    call: Callable[[], object]
    existing: Callable[[], Iterable[torch.Tensor]]
    first: Callable[[], object] = lambda: None
    kinds: Callable[[], Mapping[str, Iterable[torch.Tensor]]] | None = None
    phases: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    owners: Callable[[], Mapping[int, torch.Tensor]] = dict

    @classmethod
    def of_kinds(
        cls,
        scope: str,
        call: Callable[[], object],
        kinds: Callable[[], Mapping[str, Iterable[torch.Tensor]]],
        **rest: Any,
    ) -> Workload:
        """One whose tensors are known by what they are."""
        return cls(
            scope,
            call,
            lambda: [tensor for held in kinds().values() for tensor in held],
            kinds=kinds,
            **rest,
        )


UNCOUNTED = "a compiled kernel allocates out of the counter's sight"
_HEADROOM = 0.9  # of the memory that is there: the process and the system need some
_PLANS: dict[str, Plan] = {}
_LOW = 2  # blocks: a first one and a last one
_At = Callable[[int], tuple[nn.Module, Iterable[Workload]]]
_Sections = dict[str, dict[Any, Holding]]  # scope → section → what is alive at its peak


def planned(case: Case, workloads: Callable[[], Iterable[Workload]]) -> Plan:
    """The peak memory of a case, counted on tensors that have shapes and no data; made once per process.

    Args:
        case: Its identity.
        workloads: Builds the case's workloads, models and inputs and all; called where every tensor is fake.
    """

    def peaks() -> dict[str, int]:
        return {work.scope: _peak(work) for work in workloads()}

    return _made_once(case, peaks)


def planned_by_depth(case: Case, depth: int, at: _At) -> Plan:
    """`planned` for a stack of equal blocks; arguments are as in `holdings_by_depth`."""

    def peaks() -> dict[str, int]:
        return {scope: holding.peak for scope, holding in holdings_by_depth(depth, at).items()}

    return _made_once(case, peaks)


def _made_once(case: Case, peaks: Callable[[], dict[str, int]]) -> Plan:
    if case.case_id not in _PLANS:
        try:
            with fake_tensors():
                _PLANS[case.case_id] = Plan(peaks())
        except Unsupported as error:
            _PLANS[case.case_id] = Plan(reason=one_line(error), unsupported=one_line(error))
        except Exception as error:  # the case decides by running
            _PLANS[case.case_id] = Plan(reason=f"not planned: {why_not_planned(error)}")
    return _PLANS[case.case_id]


def _peak(work: Workload) -> int:
    """Bytes of a later call at its peak."""
    work.first()
    with LiveBytes() as counter:
        counter.watch(*work.existing())
        work.call()
    return counter.peak


def followed(
    work: Workload, model: nn.Module, stacks: Iterable[nn.ModuleList] | None = None
) -> Holders:
    """The counter of one call: by its phases; or by the sections that begin with each block of `stacks`."""
    with Holders(model) as counter, counter.watching(), contextlib.ExitStack() as hooks:
        for number, stack in enumerate(stacks or ()):
            for at, block in enumerate(stack):
                _mark(counter, block, (number, at), hooks)
        for kind, tensors in work.kinds().items():
            counter.hold(kind, tensors, work.owners())
        if stacks is not None:
            work.call()
        else:
            for phase, call in (work.phases or {work.scope: work.call}).items():
                counter.begin(phase)
                call()
        for kind, tensors in work.kinds().items():
            counter.left(kind, tensors)
    return counter


def _mark(
    counter: Holders, block: nn.Module, place: tuple[int, int], hooks: contextlib.ExitStack
) -> None:
    """Begin a section with a block, after it, and with its backward pass."""

    def forward(section: str) -> None:
        if (
            counter.section is None or counter.section[0] != "backward"
        ):  # else it is computed again, for its gradient
            counter.begin((section, *place))

    def made(module: nn.Module, inputs: object, out: Any) -> None:
        forward("after")
        if isinstance(out, torch.Tensor) and out.requires_grad:
            out.register_hook(lambda _: counter.begin(("backward", *place)))

    hooks.callback(block.register_forward_pre_hook(lambda *_: forward("forward")).remove)
    hooks.callback(block.register_forward_hook(made).remove)


def holdings_by_depth(
    depth: int, at: _At, shared: Callable[[Holding], Holding] = lambda whole: whole
) -> dict[str, Holding]:
    """What is alive at each scope's peak in a stack of equal blocks, from two low ones on tensors without data.

    With each block more, the peak between two blocks' borders grows by the same amount: of weights, gradients, states, caches and
    activations it holds that much more. So each such section's peak follows from two stacks. The whole one's is the largest of
    them, and in a high stack another section may have it than in a low one.

    Args:
        depth: How many blocks; 0 where it is not known what is stacked.
        at: The model with so many blocks, and its workloads, whose tensors are known by kind.
        shared: What is held of it where it is shared out.
    """
    with fake_tensors():
        found = _of_sections(depth, at)
    return {scope: _largest(map(shared, sections.values())) for scope, sections in found.items()}


def _of_sections(depth: int, at: _At) -> _Sections:
    if depth <= _LOW + 1:
        return _at_places(at, {str(n): n for n in range(depth)}, depth)
    low, high = (_at_places(at, {"first": 0, "last": n - 1}, n) for n in (_LOW, _LOW + 1))

    def grown(scope: str, section: Any) -> Holding:
        return low[scope][section].grown(high[scope][section], depth - _LOW)

    return {
        scope: {section: grown(scope, section) for section in sections}
        for scope, sections in low.items()
    }


def _at_places(at: _At, places: Mapping[str, int], depth: int) -> _Sections:
    """What sections hold, of blocks at named places alone, so that stacks of several heights have the same."""
    model, works = at(depth)
    stacks = [
        part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == depth
    ]
    found: _Sections = {}
    for work in works:
        work.first()
        named = found[work.scope] = {}
        for section, held in followed(work, model, stacks).holdings().items():
            if section is None:
                named[section] = held
                continue
            direction, stack, block = section
            named |= {
                (direction, stack, name): held for name, place in places.items() if place == block
            }
    return found


def _largest(found: Iterable[Holding]) -> Holding:
    return max(found, key=lambda held: held.peak)


def fits(plan: Plan, memory: int) -> bool:
    """Whether so many bytes are enough, as far as anybody knows."""
    return plan.most is None or plan.most <= _HEADROOM * memory


def shortage(plan: Plan, device: str) -> str:
    """Why the case will not fit into what is free now; empty where it will, or nobody knows."""
    free = free_bytes(device)
    if free is None or fits(plan, free):
        return ""
    return f"it needs {plan.most / MIB:,.0f} MiB and {free / MIB:,.0f} MiB are free; shorten it, or give fewer sequences or layers"


def start_case(case: Case, params: Params, ceilings: dict[str, float]) -> Measuring:
    """The rows of one case, and the timings that it asks for, unless it cannot run here.

    Args:
        case: Any.
        params: Those of its notebook.
        ceilings: As `roofline_ms` takes them.

    Raises:
        Unsupported: This machine cannot run it.
        WillNotFit: Its plan exceeds the memory that is free.
    """
    if reason := case.unsupported():
        raise Unsupported(reason)
    plan = case.plan()
    if plan.unsupported:
        raise Unsupported(plan.unsupported)
    if reason := shortage(plan, case.device):
        raise WillNotFit(reason)
    yield from case.measure(params, ceilings)


def memory_rows(work: Workload, device: str, plan: Plan, counted: bool = True) -> list[Measurement]:
    """Peak memory of one call beside its plan; without `counted` its tensors are born where no counter sees them."""
    if not counted:
        message = f"{UNCOUNTED}; see resident_memory"
        refused = Measurement(
            "peak_memory", scope=work.scope, status=Status.UNSUPPORTED, message=message
        )
        return [refused, resident_row(work.call, work.scope)]
    work.first()  # counted from where the plan was
    return measure_memory(
        work.call,
        device=device,
        existing=tuple(work.existing()),
        scope=work.scope,
        predicted_bytes=plan.peaks.get(work.scope),
    )


def first_call_ms(call: Callable[[], object]) -> float:
    """What one call takes, compiling included where it is the first.

    Raises:
        Unsupported: The call only begins its work, or torch gives up compiling it.
    """
    checked, start = CallCheck(call, "call", Unsupported), time.perf_counter()
    checked()
    return (time.perf_counter() - start) * 1e3


def compile_row(first_ms: float, later_ms: float) -> Measurement:
    """What compiling took."""
    method = "first call less a later one"
    return Measurement(
        "latency", max(0.0, first_ms - later_ms), n=1, method=method, scope="compile"
    )


def trace(work: Workload, case: Case, params: Params) -> None:
    """Write the profiler's trace and table of one call into the folder `traces` of the output, where the parameters ask for it."""
    if not params.trace:
        return
    case_name, scope = (
        re.sub(r"[^A-Za-z0-9=.,+-]+", "-", text) for text in (f"{params.NAME} {case}", work.scope)
    )
    path = (
        make_folder(output_folder() / "traces")
        / f"{case_name[:100].strip('-')}-{scope}-{case.case_id[:6]}"
    )
    write_trace(work.call, path, sort=params.trace_sort, top=params.trace_top, device=case.device)
