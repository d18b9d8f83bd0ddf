"""What tensors without data show of a case before it runs: memory, weights, work and traffic."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanolib.measurement import Unsupported
from nanolib.meters.flops import FlopCount, count_flops
from nanolib.meters.memory import fake_tensors, why_not_planned
from nanolib.meters.memory_breakdown import MemoryBreakdown
from nanolib.meters.reads import BytesRead
from nanolib.models.user import resolve, silent
from nanolib.run.case import Plan
from nanolib.run.memory_plan import breakdowns_by_depth
from nanolib.run.timeout import one_line, planning_time_limit
from nanolib.run.worker import answers_of

# of one case in the helper, s; if Python can be interrupted, `planning_time_limit` ends it before
_LIMIT_S = 90.0


@dataclass(frozen=True)
class Counted:
    """The work of one call of a model.

    Attributes:
        parameters: Weights.
        flops: FLOP of what is timed; in training the backward pass too, as far as weights learn.
            Attention counts the pairs that its mask keeps.
        bytes: Bytes that must move at least once.
        count: FLOPs of a model of the user's own, as they were counted.
    """

    parameters: int
    flops: float
    bytes: int
    count: FlopCount | None = None


def elements_moved(mode: str, parameters: int, learning: int) -> int:
    """Count the elements that a call must move at least once.

    A forward pass reads the weights. A training step reads them twice, writes gradients, and fused
    AdamW reads those, the weights and both states, and writes all but the gradients.

    Args:
        mode: Of the call.
        parameters: Weights.
        learning: Those of them that get a gradient.
    """
    return 2 * parameters + (1 + 4 + 3) * learning if mode == "training" else parameters


@dataclass(frozen=True)
class Look:
    """What tensors without data show of a case.

    Attributes:
        plan: Its peaks, or why they are not planned.
        breakdowns: Scope → what is alive at its peak.
        counted: Of your own model; None if it does not run without data.
    """

    plan: Plan
    breakdowns: dict[str, MemoryBreakdown] = dataclasses.field(default_factory=dict)
    counted: Counted | None = None


class _ProductsOfExperts(TorchDispatchMode):
    """Gives the products of a mixture's experts a shape in each dtype; torch does so in bfloat16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the empty result that torch's kernel makes, or run another operation."""
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype is torch.bfloat16:
            return func(*args, **kwargs or {})
        from torch._meta_registrations import _create_grouped_mm_output_tensor as empty_product

        return empty_product(*args[:3], args[0].dtype)


@contextlib.contextmanager
def without_data() -> Iterator[None]:
    """Make tensors without data in the block, and drop what the model's code prints."""
    with fake_tensors(), silent(), _ProductsOfExperts():
        yield


_LOOKS: dict[str, Look] = {}


def look_at(case: Any) -> Look:
    """Look at a `ModelCase`; `look_at_code` does if its model is your code.

    Raises:
        BadInput: There is no such model.
    """
    if case.case_id not in _LOOKS:
        if case.runs_code:
            look_at_code(case.preset, [case])
        else:
            _LOOKS[case.case_id] = _look(case)
    return _LOOKS[case.case_id]


def look_at_code(name: str, cases: Sequence[Any]) -> None:
    """Look at your code once for all its cases, in a process that ends afterwards.

    Args:
        name: Where the model comes from.
        cases: Of type `ModelCase`; without any, only the name is checked.

    Raises:
        BadInput: There is no such model.
    """
    wanted = {case.case_id: case for case in cases if case.case_id not in _LOOKS}
    if cases and not wanted:
        return
    looks, reason = answers_of(_looks, name, [*wanted.values()], limit_s=_LIMIT_S)
    _LOOKS.update(dict.fromkeys(wanted, Look(Plan(reason=f"not planned: {reason}"))))
    _LOOKS.update(zip(wanted, looks, strict=False))


def _looks(name: str, cases: Sequence[Any]) -> Iterator[Look]:
    resolve(name)
    yield from map(_look, cases)


def _look(case: Any) -> Look:
    if reason := case.not_planned():
        return Look(Plan(reason=reason))
    breakdowns: dict[str, MemoryBreakdown] = {}
    try:
        with without_data(), planning_time_limit():
            breakdowns = breakdowns_by_depth(
                0 if case.own else case.config.num_layers, case.at_depth
            )
        plan = Plan({scope: breakdown.peak for scope, breakdown in breakdowns.items()})
    except Unsupported as error:
        return Look(Plan(reason=one_line(error), unsupported=one_line(error)))
    except (Exception, SystemExit) as error:  # the case decides by running
        plan = Plan(reason=f"not planned: {why_not_planned(error)}")
    if not case.own:
        return Look(plan, breakdowns)
    try:
        with without_data(), planning_time_limit():
            return Look(plan, breakdowns, _count(case))
    except (Exception, SystemExit) as error:
        reason = plan.reason or f"not counted: {why_not_planned(error)}"
        return Look(dataclasses.replace(plan, reason=reason), breakdowns)


def count_by_running(case: Any) -> None:
    """Count by a run what tensors without data did not show; `look_at` returns it from then on."""
    _LOOKS[case.case_id] = dataclasses.replace(look_at(case), counted=_count(case))


def _count(case: Any) -> Counted:
    model = case.build()
    weights = list(model.parameters())
    # checkpointing computes more, and autocast counts the same
    step = dataclasses.replace(case, optimization="eager").step(model, case.no_ids(), 1e-3)
    cache = step.filled() if case.position else []
    with BytesRead([*weights, *cache]) as reads:
        flops = count_flops(step)
    count, learning = (
        sum(weight.numel() for weight in some)
        for some in (weights, (weight for weight in weights if weight.requires_grad))
    )
    moved = elements_moved(case.mode, count, learning) * case.item
    return Counted(count, flops.kept, reads.bytes if case.position else moved, flops)
