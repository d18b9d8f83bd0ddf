"""What is known of a model's case before it runs: its memory; and, where no formula knows them, its weights, work and traffic."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nanolib.experiments.model.steps import Training
from nanolib.measurement import Unsupported
from nanolib.meters.flops import count_flops
from nanolib.meters.holders import Holding
from nanolib.meters.memory import fake_tensors, why_not_planned
from nanolib.meters.reads import BytesRead
from nanolib.models.generation import generation_of
from nanolib.models.user import logits_of, resolve, silent
from nanolib.run.case import Plan
from nanolib.run.helper import answers_of
from nanolib.run.memory_plan import holdings_by_depth
from nanolib.run.timeout import one_line, time_to_look

_LIMIT_S = (
    90.0  # of one case in the helper; where Python can be interrupted `time_to_look` ends it before
)


@dataclass(frozen=True)
class Counted:
    """What one call of a model takes.

    Attributes:
        parameters: Weights.
        learning: Those of them that get a gradient.
        flops: FLOP of a forward pass; after a prompt those of one token.
        training_flops: FLOP of a forward and a backward pass; 0 where nothing is trained.
        read: Bytes of weights and cache that one token after a prompt reads; 0 without a prompt.
    """

    parameters: int
    learning: int
    flops: int
    training_flops: int = 0
    read: int = 0


@dataclass(frozen=True)
class Look:
    """What tensors without data tell of a case.

    Attributes:
        plan: Its peaks, or why they are not planned.
        holdings: Scope → what is alive at its peak.
        counted: Of a model of the user's own; None where it does not run without data.
    """

    plan: Plan
    holdings: dict[str, Holding] = dataclasses.field(default_factory=dict)
    counted: Counted | None = None


_LOOKS: dict[str, Look] = {}


def look_at(case: Any) -> Look:
    """What is known of a `ModelCase`; a model that is code of the user's is looked at in a helper process.

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
    """Look at a model that is code of the user's, once for all its cases, in a process that is ended afterwards.

    Args:
        name: Where it comes from.
        cases: Of type `ModelCase`.

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
    counted = None
    try:
        with fake_tensors(), silent(), time_to_look():
            holdings = holdings_by_depth(0 if case.own else case.config.num_layers, case.at_depth)
        plan = Plan({scope: holding.peak for scope, holding in holdings.items()})
    except Unsupported as error:
        plan, holdings = Plan(reason=one_line(error), unsupported=one_line(error)), {}
    except (Exception, SystemExit) as error:  # the case decides by running
        plan, holdings = Plan(reason=f"not planned: {why_not_planned(error)}"), {}
    if case.own and not plan.unsupported:
        try:
            with fake_tensors(), silent(), time_to_look():
                counted = _count(case)
        except (Exception, SystemExit) as error:
            plan = dataclasses.replace(
                plan, reason=plan.reason or f"not counted: {why_not_planned(error)}"
            )
    return Look(plan, holdings, counted)


def count_by_running(case: Any) -> None:
    """Count by a run what tensors without data did not tell; `look_at` knows it from then on."""
    _LOOKS[case.case_id] = dataclasses.replace(look_at(case), counted=_count(case))


def _count(case: Any) -> Counted:
    model = case.build().eval()
    size = sum(p.numel() for p in model.parameters())
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    ids = torch.zeros(case.batch_size, case.seq_len + 1, dtype=torch.int64, device=case.device)
    if case.position:
        generation = generation_of(model, ids[:, :-1], 1)
        generation.prefill()
        *cache, _, _ = generation.tensors
        with BytesRead([*model.parameters(), *cache]) as reads:
            flops = count_flops(generation.decode)
        return Counted(size, learning, flops, read=reads.bytes)
    with torch.no_grad():
        flops = count_flops(functools.partial(logits_of(model), ids[:, :-1]))
    if case.mode != "training":
        return Counted(size, learning, flops)
    step = Training(model, ids, "eager", 1e-3)

    def both() -> None:
        step.forward()
        step.backward()

    return Counted(size, learning, flops, count_flops(both, as_model=True))
