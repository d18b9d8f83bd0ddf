"""What does a whole model cost here? Inference, training and generation over presets, lengths and optimisations; and the loss."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pydantic
import torch
from torch import nn

from nanolib.experiments.model.model_cases import GenerationCase, LossCase, Mode, ModelCase, model_name
from nanolib.experiments.model.steps import Generating, Inferring, Step, Training, check_loss
from nanolib.measurement import BadInput, Measurement, Unsupported, exact, shown
from nanolib.meters import measure, measure_phases
from nanolib.meters.ceilings import rate
from nanolib.meters.flops import BACKWARD_FACTOR, count_flops
from nanolib.meters.machine import resolve_device
from nanolib.meters.memory import MIB, total_bytes
from nanolib.models import attention, text
from nanolib.models.optimise import OPTIMISATIONS, applies
from nanolib.models.transformer import next_token_loss
from nanolib.models.user import check_name, logits_of, resolve, runs_code
from nanolib.run import params as shared
from nanolib.run.ceilings import CeilingCase, ceiling_cases, rate_rows, roofline_ms
from nanolib.run.own_model import check_hugging_face, rehearse
from nanolib.run.params import Case, distinct, fitting_config, known_corpus, known_dtypes, known_kinds, known_presets
from nanolib.run.workload import (
    UNCOUNTED,
    Plan,
    check_fits,
    compile_row,
    first_call_ms,
    fits,
    memory_rows,
    planned,
    trace,
)

_ADAMW_STATES = 2
_SAFE_SHARE = 0.1  # below this share of it by a rough formula, a case fits without being planned
_ACTIVATIONS = 40  # tensors of a token's width that a block keeps for its backward pass, roughly


class Params(shared.Params):
    """Parameters of the model notebook.

    Attributes:
        presets: Names in `PRESETS`.
        model: A model of your own in the presets' place: `package.module:build`, or `hf:LlamaForCausalLM` (extra `hf`).
        model_options: What that function, or that class's configuration, takes.
        seq_lens: Sequence lengths, tokens.
        batch_sizes: Sequences per batch.
        dtypes: Types of the weights.
        attention_types: Attention kinds.
        overrides: Fields of `NanoConfig` that differ from the preset, such as `{num_layers: 2}`.
        optimisations: Names in `OPTIMISATIONS`; each inference and training is measured with each, generation eagerly.
        train: Whether to measure training steps too.
        new_tokens: Tokens generated one by one after a prompt of each sequence length; 0 for none.
        loss_steps: Steps of training on real text whose loss is recorded; 0 for none.
        learning_rate: Of AdamW, for those steps.
        corpus: A text file or folder; empty means the standard library's sources.
    """

    NAME: ClassVar[str] = "model"

    presets: list[str] = pydantic.Field(["decoder_tiny"], min_length=1)
    model: str = pydantic.Field("", max_length=500)
    model_options: dict[str, Any] = pydantic.Field(default_factory=dict)
    seq_lens: list[shared.Length] = pydantic.Field([32, 64, 128], min_length=1, max_length=64)
    batch_sizes: list[shared.Batch] = pydantic.Field([1], min_length=1, max_length=64)
    dtypes: list[str] = pydantic.Field(["float32"], min_length=1)
    attention_types: list[str] = pydantic.Field(["dense"], min_length=1)
    overrides: dict[str, Any] = pydantic.Field(default_factory=dict)
    optimisations: list[str] = pydantic.Field(["eager"], min_length=1)
    train: bool = True
    new_tokens: int = pydantic.Field(8, ge=0, le=1_000_000)
    loss_steps: int = pydantic.Field(20, ge=0, le=1_000_000)
    learning_rate: float = pydantic.Field(1e-3, gt=0, le=10)
    corpus: str = pydantic.Field("", max_length=4096)
    grids: ClassVar = (("presets", "seq_lens", "batch_sizes", "dtypes", "attention_types", "optimisations"),)

    _presets = pydantic.field_validator("presets")(known_presets)
    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)
    _kinds = pydantic.field_validator("attention_types")(known_kinds)
    _distinct = pydantic.field_validator(
        "presets", "seq_lens", "batch_sizes", "dtypes", "attention_types", "optimisations"
    )(distinct)

    @pydantic.field_validator("model")
    @classmethod
    def _model_is_there(cls, value: str) -> str:
        try:
            check_name(value)
        except BadInput as error:
            raise ValueError(error.lines[0].removeprefix("model: ")) from None
        return value

    @pydantic.field_validator("optimisations")
    @classmethod
    def _known_optimisations(cls, values: list[str]) -> list[str]:
        for value in values:
            if value not in OPTIMISATIONS:
                raise ValueError(f"{shown(value)} is no optimisation; use {', '.join(OPTIMISATIONS)}")
        return values

    _corpus = pydantic.field_validator("corpus")(known_corpus)

    @pydantic.model_validator(mode="after")
    def _configs_fit(self) -> Params:
        if self.model_options and not self.model:
            raise ValueError("model_options: there is no model to take them; set model, or use overrides for presets")
        if self.model and not runs_code(self.model):
            with contextlib.suppress(Unsupported):  # its cases will say so
                check_hugging_face(self.model, self.model_options, max(self.seq_lens))
        for preset in [] if self.model else self.presets:
            for kind in self.attention_types:
                config = fitting_config(preset, self.overrides | {"attention_type": kind})
            if max(self.seq_lens) > config.context_length:
                raise ValueError(
                    f"seq_lens: {max(self.seq_lens)} exceeds the context_length {config.context_length} of {preset}; "
                    f"shorten it or set overrides: {{context_length: {max(self.seq_lens)}}}"
                )
            if self.loss_steps and config.vocab_size < text.VOCAB_SIZE:
                raise ValueError(
                    f"overrides: vocab_size {config.vocab_size} cannot hold the {text.VOCAB_SIZE} bytes of the text; "
                    "raise it, or set loss_steps to 0"
                )
        return self


def before(params: Params) -> None:
    """Build a model of the user's own once, so that what is wrong with it is told once.

    Raises:
        BadInput: It cannot be built.
    """
    rehearse(params.model, params.model_options)


def cases(params: Params) -> list[Case]:
    """The ceilings, each model's inference, training and generation at each shape, then its loss at the shortest length.

    A case that will not fit into this machine's memory stays, to be refused, and a smaller one follows it.
    """
    device = resolve_device(params.device)
    sources = (
        [(params.model, params.model_options)] if params.model else [(p, params.overrides) for p in params.presets]
    )
    result = ceiling_cases(device, params.dtypes, params.budget_s)
    for preset, overrides in sources:
        for kind in ["own"] if params.model else params.attention_types:
            for dtype in params.dtypes:
                for case in _model_cases(params, device, preset, overrides, kind, dtype):
                    result += [case] if (smaller := _smaller(case)) is None else [case, smaller]
                if params.loss_steps:
                    model = (device, model_name(preset, overrides), preset, overrides, kind)
                    shape = (min(params.seq_lens), max(params.batch_sizes), dtype)
                    result.append(LossCase(*model, *shape, params.loss_steps, params.learning_rate, params.corpus))
    return list({case.case_id: case for case in result}.values())


def _model_cases(
    params: Params, device: str, preset: str, overrides: dict[str, Any], kind: str, dtype: str
) -> Iterator[ModelCase]:
    shapes = [(seq_len, batch_size) for seq_len in params.seq_lens for batch_size in params.batch_sizes]
    modes: tuple[Mode, ...] = ("inference", "training") if params.train else ("inference",)
    for optimisation in params.optimisations:
        model = (device, model_name(preset, overrides, optimisation), preset, overrides, kind)
        for shape in shapes:
            for mode in modes:
                if applies(optimisation, mode, dtype):
                    yield ModelCase(*model, *shape, dtype, mode, optimisation)
    if params.new_tokens:
        model = (device, model_name(preset, overrides), preset, overrides, kind)
        for shape in shapes:
            yield GenerationCase(*model, *shape, dtype, "generation", new_tokens=params.new_tokens)


def _smaller(case: ModelCase) -> ModelCase | None:
    """The case with fewer sequences, then fewer layers, until it fits; None where it fits as it is, or nothing helps."""
    total = total_bytes(case.device)
    if case.runs_code:  # to plan it is to run it
        return None
    if total is None or _rough_bytes(case) < _SAFE_SHARE * total or fits(plan(case), total):
        return None
    layers = 1 if case.own else case.config.num_layers
    for count in (layers >> halvings for halvings in range(layers.bit_length())):
        changed = [f"batch_size {case.batch_size} to 1"] if case.batch_size > 1 else []
        overrides = case.overrides
        if count < layers:
            overrides = overrides | {"num_layers": count}
            changed.append(f"num_layers {layers} to {count}")
        if not changed:
            continue
        smaller = dataclasses.replace(
            case,
            name=model_name(case.preset, overrides, case.optimisation),
            overrides=overrides,
            batch_size=1,
            reduced=f"reduced to fit into {total / 2**30:.0f} GiB: {', '.join(changed)}",
        )
        if fits(plan(smaller), total):
            return smaller
    return None


def _rough_bytes(case: ModelCase) -> float:
    """Of weights, states, logits and activations, by a formula that errs upwards."""
    if case.own:
        return float("inf")
    config = case.config
    item = getattr(torch, case.dtype).itemsize
    tokens = case.batch_size * case.seq_len
    kept = _ACTIVATIONS * config.d_model * (config.num_layers if case.mode == "training" else 1)
    weights = config.parameter_count * (2 + _ADAMW_STATES if case.mode == "training" else 1)
    cached = 2 * config.num_layers * config.d_model if case.mode == "generation" else 0
    return item * (weights + tokens * (kept + cached + 4 * config.vocab_size))


def predict(case: Case, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
    """What formulas say before anything runs.

    Args:
        case: A `ModelCase`; the others have no prediction.
        ceilings: As `roofline_ms` takes them.

    Returns:
        `parameters`, `footprint` (MiB of weights), `flops` (FLOP: the forward pass, or in training forward and backward),
        `bytes` (weights and, in generation, the cache, each as often as it must move), `peak_memory` (MiB, counted on tensors
        without data) where it can be planned, `latency` (ms, roofline) where the ceilings are known; in generation `flops`,
        `bytes` and `latency` are those of one token.
    """
    if not isinstance(case, ModelCase):
        return {}
    try:
        count, flops = case.parameter_count, case.flops
    except (Unsupported, BadInput):
        return {}  # what is missing is said by `unsupported`
    item = getattr(torch, case.dtype).itemsize
    weights = count * item
    training = case.mode == "training"
    work = flops * (1 + BACKWARD_FACTOR) if training else flops
    moved = (3 if training else 1) * weights
    if case.position and not case.own:
        config = case.config
        moved += 2 * config.num_layers * case.batch_size * case.seq_len * config.kv_heads * config.head_dim * item
    predicted: dict[str, float | str] = {
        "parameters": count,
        "footprint": weights / MIB,
        "flops": work,
        "bytes": moved,
    }
    if (most := plan(case).most) is not None:
        predicted["peak_memory"] = most / MIB
    if (latency := roofline_ms(work, moved, case.dtype, ceilings or {})) is not None:
        predicted["latency"] = latency
    return predicted


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
        return Generating(model, ids[:, :-1], case.new_tokens)
    if case.mode == "inference":
        return Inferring(model, ids[:, :-1], case.optimisation)
    return Training(model, ids, case.optimisation, learning_rate)


def unsupported(case: Case) -> str:
    """Why this machine cannot run the case; empty when it can, as far as can be told without running it."""
    if isinstance(case, ModelCase | LossCase) and case.own and not case.runs_code:
        try:
            resolve(case.preset)
        except Unsupported as error:
            return str(error)
    if isinstance(case, ModelCase) and case.own and not case.runs_code and (reason := plan(case).unsupported):
        return reason
    if isinstance(case, ModelCase) and case.optimisation == "cuda_graph" and not case.device.startswith("cuda"):
        return f"CUDA graphs need a CUDA device, and this is {case.device}"
    return ""


def measure_case(case: Case, params: Params, ceilings: dict[str, float]) -> Iterator[Measurement]:
    """The rows of one case."""
    if isinstance(case, CeilingCase):
        yield from case.measure()
    elif isinstance(case, LossCase):
        yield _measure_loss(case, params.seed)
    else:
        yield from _measure_model(case, params, ceilings)


def _measure_model(case: ModelCase, params: Params, ceilings: dict[str, float]) -> Iterator[Measurement]:
    if reason := unsupported(case):
        raise Unsupported(reason)
    if isinstance(case, GenerationCase):
        _check_context(case)
    check_fits(plan(case), case.device)
    model = case.build(params.seed)
    weights = tuple(model.parameters())
    predicted = predict(case, ceilings)
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


def _timing(case: ModelCase, params: Params) -> dict[str, Any]:
    return {"rel_ci": params.rel_ci, "budget_s": params.budget_s, "device": case.device}


def _measure_inference(
    case: ModelCase, params: Params, step: Inferring, predicted: dict, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    flops = int(predicted["flops"])
    first_ms = first_call_ms(step.forward)
    if not case.own:
        yield exact("flops", flops, scope="inference")
    counted = {} if case.own else {"predicted": flops}
    yield exact("flops", count_flops(step.eager), scope="inference", method="flop_counter", **counted)
    yield exact("bytes", predicted["bytes"], scope="inference")
    latency = measure(step.forward, scope="inference", predicted=predicted.get("latency"), **_timing(case, params))
    yield latency
    yield from rate_rows(latency, flops, case.dtype, ceilings)
    yield rate("tokens_per_second", step.ids.numel(), latency)
    if case.optimisation != "eager":
        yield exact("relative_error", step.difference(), scope="against_eager", method="logits")
    if case.optimisation == "compile":
        yield compile_row(first_ms, latency.estimate)


def _measure_training(
    case: ModelCase, params: Params, step: Training, predicted: dict, ceilings: dict[str, float]
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
    case: GenerationCase, params: Params, step: Generating, predicted: dict, ceilings: dict[str, float]
) -> Iterator[Measurement]:
    """Time to the first token (the prompt read), then time per token over the cache that grows and starts over."""
    first = measure(step.generation.prefill, scope="prefill", **_timing(case, params))
    yield first
    yield rate("tokens_per_second", step.generation.prompt.numel(), first)
    yield exact("flops", int(predicted["flops"]), scope="decode", method="flop_counter" if case.own else "formula")
    yield exact("bytes", predicted["bytes"], scope="decode")
    each = measure(step.generation.decode, scope="decode", predicted=predicted.get("latency"), **_timing(case, params))
    yield each
    yield from rate_rows(each, predicted["flops"], case.dtype, ceilings)
    yield rate("tokens_per_second", case.batch_size, each)


_MEASURED: dict[str, Callable[..., Iterator[Measurement]]] = {
    "inference": _measure_inference,
    "training": _measure_training,
    "generation": _measure_generation,
}


def text_batch(case: Any, corpus: str, seed: int) -> torch.Tensor:
    """Ids that a case works on: real text, int64 [batch_size, seq_len + 1], on its device."""
    generator = torch.Generator().manual_seed(seed)
    return text.batch(text.load(corpus), case.batch_size, case.seq_len + 1, generator).to(case.device)


def _measure_loss(case: LossCase, seed: int) -> Measurement:
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
