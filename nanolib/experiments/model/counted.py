"""What torch counts of a model that no formula knows: its weights, its work and its traffic."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from nanolib.experiments.model.steps import Training
from nanolib.meters.flops import count_flops
from nanolib.meters.memory import fake_tensors
from nanolib.meters.reads import BytesRead
from nanolib.models.generation import generation_of
from nanolib.models.user import logits_of, silent
from nanolib.run.outcome import LookTimeout, time_to_look


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


_KNOWN: dict[str, Counted | LookTimeout] = {}


def counted(case: Any) -> Counted:
    """What torch counts of a `ModelCase`, on tensors without data.

    Raises:
        LookTimeout: It does not come to an end.
    """
    if case.case_id not in _KNOWN:
        try:
            with fake_tensors(), silent(), time_to_look():
                _KNOWN[case.case_id] = _count(case)
        except LookTimeout as error:  # it would not come to an end the next time either
            _KNOWN[case.case_id] = error
    found = _KNOWN[case.case_id]
    if isinstance(found, LookTimeout):
        raise found
    return found


def count_by_running(case: Any) -> None:
    """The same by a run, where tensors without data would not do; `counted` knows it from then on."""
    _KNOWN[case.case_id] = _count(case)


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
