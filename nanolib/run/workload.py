"""What a case runs: each call with the tensors that were there before it, so that its memory can be measured, or planned unrun."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from nanolib.measurement import Measurement, Status, Unsupported
from nanolib.meters.layers.trace import write_trace
from nanolib.meters.memory import MIB, LiveBytes, fake_tensors, free_bytes, measure_memory
from nanolib.paths import make_folder, output_folder
from nanolib.run.case import Case, Plan
from nanolib.run.outcome import WillNotFit, one_line
from nanolib.run.params import Params


@dataclass(frozen=True)
class Workload:
    """One call of a case.

    Attributes:
        scope: What its rows say was measured.
        call: What is called.
        existing: Gives the tensors that count although they were there before: weights, inputs, the optimizer's states.
        keeps: Whether its first call leaves tensors behind that later ones find: gradients, the optimizer's states, a cache.
    """

    scope: str
    call: Callable[[], object]
    existing: Callable[[], Iterable[torch.Tensor]]
    keeps: bool = True


UNCOUNTED = "a compiled kernel allocates out of the counter's sight"
_HEADROOM = 0.9  # of the memory that is there: the process and the system need some
_PLANS: dict[str, Plan] = {}


def planned(case: Case, workloads: Callable[[], Iterable[Workload]]) -> Plan:
    """The peak memory of a case, counted on tensors that have shapes and no data; made once per process.

    Args:
        case: Its identity.
        workloads: Builds the case's workloads, models and inputs and all; called where every tensor is fake.
    """
    if case.case_id not in _PLANS:
        try:
            with fake_tensors():
                _PLANS[case.case_id] = Plan({work.scope: _planned_peak(work) for work in workloads()})
        except Unsupported as error:
            _PLANS[case.case_id] = Plan(reason=one_line(error), unsupported=one_line(error))
        except (
            Exception
        ) as error:  # a model may look at its data; the plan then says so, and the case decides by running
            _PLANS[case.case_id] = Plan(reason=f"cannot be planned: {type(error).__name__}: {one_line(error)}")
    return _PLANS[case.case_id]


def _planned_peak(work: Workload) -> int:
    if work.keeps:
        work.call()
    with LiveBytes() as counter:
        counter.watch(*work.existing())
        work.call()
    return counter.peak


def fits(plan: Plan, memory: int) -> bool:
    """Whether so many bytes are enough, as far as anybody knows."""
    return plan.most is None or plan.most <= _HEADROOM * memory


def shortage(plan: Plan, device: str) -> str:
    """Why the case will not fit into what is free now; empty where it will, or nobody knows."""
    free = free_bytes(device)
    if free is None or fits(plan, free):
        return ""
    return f"it needs {plan.most / MIB:,.0f} MiB and {free / MIB:,.0f} MiB are free; shorten it, or give fewer sequences or layers"


def check_fits(plan: Plan, device: str) -> None:
    """Refuse a case before anything of it is made.

    Raises:
        WillNotFit: Its plan exceeds the memory that is free.
    """
    if reason := shortage(plan, device):
        raise WillNotFit(reason)


def measure_case(case: Case, params: Params, ceilings: dict[str, float]) -> Iterator[Measurement]:
    """The rows of one case, unless it cannot run here.

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
    check_fits(case.plan(), case.device)
    yield from case.measure(params, ceilings)


def memory_rows(work: Workload, device: str, plan: Plan, counted: bool = True) -> list[Measurement]:
    """Peak memory of one call beside its plan; without `counted` its tensors are born where no counter sees them."""
    rows = measure_memory(
        work.call,
        device=device,
        existing=tuple(work.existing()),
        scope=work.scope,
        predicted_bytes=plan.peaks.get(work.scope),
    )
    if not counted:
        message = f"{UNCOUNTED}; see resident_memory"
        rows[0] = Measurement("peak_memory", scope=work.scope, status=Status.UNSUPPORTED, message=message)
    return rows


def first_call_ms(call: Callable[[], object]) -> float:
    """What one call takes, compiling included where it is the first."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def compile_row(first_ms: float, later_ms: float) -> Measurement:
    """What compiling took."""
    method = "first call less a later one"
    return Measurement("latency", max(0.0, first_ms - later_ms), n=1, method=method, scope="compile")


def trace(work: Workload, case: Case, params: Params) -> None:
    """Write the profiler's trace and table of one call into the folder `traces` of the output, where the parameters ask for it."""
    if not params.trace:
        return
    name = re.sub(r"[^A-Za-z0-9=.,+-]+", "-", f"{params.NAME} {case} {work.scope}").strip("-")
    path = make_folder(output_folder() / "traces") / f"{name[:120]}-{case.case_id[:6]}"
    write_trace(work.call, path, sort=params.trace_sort, top=params.trace_top, device=case.device)
