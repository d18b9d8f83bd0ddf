"""How one model is measured: inference, training, generation, and the loss on real text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nanolib.experiments.model.model_cases import GenerationCase, LossCase, ModelCase
from nanolib.experiments.model.steps import Generating, Inferring, Step, Training, check_loss
from nanolib.measurement import Measurement, Unsupported, exact
from nanolib.meters import measure, measure_phases
from nanolib.meters.ceilings import rate
from nanolib.meters.flops import count_flops
from nanolib.meters.memory import MIB
from nanolib.models import attention, text
from nanolib.models.transformer import next_token_loss
from nanolib.models.user import logits_of
from nanolib.run.ceilings import rate_rows
from nanolib.run.params import Case
from nanolib.run.workload import (
    UNCOUNTED,
    Plan,
    check_fits,
    compile_row,
    first_call_ms,
    memory_rows,
    planned,
    trace,
)


def plan(case: Case) -> Plan:
    """The peak memory of a case, counted without running it; of a compiled or captured model it is the eager one's."""
    if not isinstance(case, ModelCase):
        return Plan()
    if reason := _not_planned(case):
        return Plan(reason=reason)
    eager = case.optimisation in ("compile", "cuda_graph")
    like = dataclasses.replace(case, optimisation="eager") if eager else case

    def workloads() -> Any:
        ids = torch.zeros(case.batch_size, case.seq_len + 1, dtype=torch.int64, device=case.device)
        return step_of(like, like.build(), ids, 1e-3).workloads()

    return planned(like, workloads)


def _not_planned(case: ModelCase) -> str:
    if case.own:
        return ""
    options = attention.shared_options(case.attention_type, case.config.attention_options)
    if case.attention_type == "flex":
        return UNCOUNTED
    known = attention.work(case.attention_type, 1, 1, causal=True, options=options)
    return "" if known else "what is kept depends on the input"


def step_of(case: ModelCase, model: nn.Module, ids: torch.Tensor, learning_rate: float) -> Step:
    """The calls of a case: what its times and its memory are of."""
    if isinstance(case, GenerationCase):
        return Generating(model, ids[:, :-1], case.new_tokens, case.optimisation)
    if case.mode == "inference":
        return Inferring(model, ids[:, :-1], case.optimisation)
    return Training(model, ids, case.optimisation, learning_rate)


def measure_model(
    case: ModelCase, params: Any, ceilings: dict[str, float], predicted: dict[str, float | str]
) -> Iterator[Measurement]:
    """The rows of one model on one shape: its size, times, rates and memory.

    Args:
        case: Which.
        params: The notebook's.
        ceilings: As `roofline_ms` takes them.
        predicted: What formulas say of it.

    Raises:
        WillNotFit: It needs more memory than is free.
    """
    if isinstance(case, GenerationCase):
        _check_context(case)
    check_fits(plan(case), case.device)
    model = case.build(params.seed)
    weights = tuple(model.parameters())
    count = sum(p.numel() for p in weights)
    yield exact("parameters", count, method="count", predicted=predicted["parameters"], message=case.reduced)
    footprint = sum(p.nbytes for p in weights) / MIB
    yield exact("footprint", footprint, method="count", predicted=predicted["footprint"])
    ids = text_batch(case, params.corpus, params.seed)
    step = step_of(case, model, ids, params.learning_rate)
    yield from _MEASURED[case.mode](case, params, step, predicted, ceilings)
    counted = case.optimisation != "compile" or case.device.startswith("cuda")
    for work in step.workloads():
        trace(work, case, params)  # before the memory is counted: under a counter nothing compiled runs
        yield from memory_rows(work, case.device, plan(case), counted)


def _check_context(case: GenerationCase) -> None:
    length = case.context_length
    if length is not None and case.seq_len + case.new_tokens > length:
        raise Unsupported(
            f"a prompt of {case.seq_len} and {case.new_tokens} new tokens exceed the context_length {length}; "
            "shorten seq_lens or lower new_tokens"
        )


def _measure_inference(
    case: ModelCase, params: Any, step: Inferring, predicted: dict, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    flops = int(predicted["flops"])
    first_ms = first_call_ms(step.forward)
    if not case.own:
        yield exact("flops", flops, scope="inference")
    counted = {} if case.own else {"predicted": flops}
    yield exact("flops", count_flops(step.eager), scope="inference", method="flop_counter", **counted)
    yield exact("bytes", predicted["bytes"], scope="inference")
    latency = measure(step.forward, scope="inference", predicted=predicted.get("latency"), **params.timing(case.device))
    yield latency
    yield from rate_rows(latency, flops, case.dtype, ceilings)
    yield rate("tokens_per_second", step.ids.numel(), latency)
    if case.optimisation != "eager":
        yield exact("relative_error", step.difference(), scope="against_eager", method="logits")
    if case.optimisation == "compile":
        yield compile_row(first_ms, latency.estimate)


def _measure_training(
    case: ModelCase, params: Any, step: Training, predicted: dict, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    flops = int(predicted["flops"])
    yield exact("flops", flops, scope="training_step")
    yield exact("bytes", predicted["bytes"], scope="training_step")
    if case.optimisation != "eager":  # before the first step changes the weights
        first_ms, later_ms = (first_call_ms(step.gradient) for _ in range(2))
        if case.optimisation == "compile":
            yield compile_row(first_ms, later_ms)
        yield exact("relative_error", step.difference(), scope="against_eager", method="gradient")
    timings = measure_phases(step.phases, params.rel_ci, params.budget_s, device=case.device)
    total = timings.pop("total")
    yield from timings.values()
    total = dataclasses.replace(total, scope="training_step", predicted=predicted.get("latency"))
    yield total
    yield from rate_rows(total, flops, case.dtype, ceilings)
    yield rate("tokens_per_second", step.ids[:, :-1].numel(), total)


def _measure_generation(
    case: GenerationCase, params: Any, step: Generating, predicted: dict, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    """Time to the first token (the prompt read), then time per token over the cache that grows and starts over."""
    first = measure(step.generation.prefill, scope="prefill", **params.timing(case.device))
    yield first
    yield rate("tokens_per_second", step.generation.prompt.numel(), first)
    yield exact("flops", int(predicted["flops"]), scope="decode", method="flop_counter" if case.own else "formula")
    yield exact("bytes", predicted["bytes"], scope="decode")
    each = measure(
        step.generation.decode, scope="decode", predicted=predicted.get("latency"), **params.timing(case.device)
    )
    yield each
    yield from rate_rows(each, predicted["flops"], case.dtype, ceilings)
    yield rate("tokens_per_second", case.batch_size, each)
    if case.optimisation != "eager":
        yield exact("relative_error", step.difference(), scope="against_eager", method="logits")


def text_batch(case: Any, corpus: str, seed: int) -> torch.Tensor:
    """Ids that a case works on: real text, int64 [batch_size, seq_len + 1], on its device."""
    generator = torch.Generator().manual_seed(seed)
    return text.batch(text.load(corpus), case.batch_size, case.seq_len + 1, generator).to(case.device)


def measure_loss(case: LossCase, seed: int) -> Measurement:
    """The loss before each step, on fresh windows of real text; the estimate is the mean of the last tenth of them."""
    model = case.build(seed)
    check_loss(model)
    logits = logits_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, fused=True)
    data, generator = text.load(case.corpus), torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(case.steps):
        ids = text.batch(data, case.batch_size, case.seq_len + 1, generator).to(case.device)
        loss = next_token_loss(logits, ids)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    last = losses[-max(1, len(losses) // 10) :]
    return Measurement(
        "loss",
        sum(last) / len(last),
        n=len(last),
        samples=tuple(losses),
        method="byte text, AdamW",
        scope="training",
        message=f"mean over the last {len(last)} of {case.steps} steps; one seed, so no interval",
        details={"first": losses[0], "last": losses[-1]},
    )


_MEASURED: dict[str, Callable[..., Iterator[Measurement]]] = {
    "inference": _measure_inference,
    "training": _measure_training,
    "generation": _measure_generation,
}
