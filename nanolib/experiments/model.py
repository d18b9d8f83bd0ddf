"""What does a whole model cost here? Inference and training time, tokens/s, memory and loss over presets and lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pydantic
import torch

from nanolib.config import NanoConfig
from nanolib.experiments import params as shared
from nanolib.experiments.ceilings import CeilingCase, ceiling_cases, rate_rows, roofline_ms
from nanolib.experiments.params import Case, distinct, known_dtypes, known_kinds, known_presets
from nanolib.measurement import BadInput, Measurement, Unsupported, exact
from nanolib.meters import measure, measure_phases
from nanolib.meters.ceilings import rate
from nanolib.meters.flops import BACKWARD_FACTOR, count_flops, model_flops
from nanolib.meters.machine import resolve_device
from nanolib.meters.memory import MIB, measure_memory
from nanolib.models import Transformer, attention, create_model, text
from nanolib.models.transformer import KVCache

_ADAMW_STATES = 2


class Params(shared.Params):
    """Parameters of the model notebook.

    Attributes:
        presets: Names in `PRESETS`.
        seq_lens: Sequence lengths, tokens.
        batch_sizes: Sequences per batch.
        dtypes: Types of the weights.
        attention_types: Attention kinds.
        overrides: Fields of `NanoConfig` that differ from the preset, such as `{num_layers: 2}`.
        train: Whether to measure training steps too.
        new_tokens: Tokens generated one by one after a prompt of each sequence length; 0 for none.
        loss_steps: Steps of training on real text whose loss is recorded; 0 for none.
        learning_rate: Of AdamW, for those steps.
        corpus: A text file or folder; empty means the standard library's sources.
    """

    presets: list[str] = pydantic.Field(["decoder_tiny"], min_length=1)
    seq_lens: list[pydantic.PositiveInt] = pydantic.Field([32, 64, 128], min_length=1, max_length=64)
    batch_sizes: list[pydantic.PositiveInt] = pydantic.Field([1], min_length=1, max_length=64)
    dtypes: list[str] = pydantic.Field(["float32"], min_length=1)
    attention_types: list[str] = pydantic.Field(["dense"], min_length=1)
    overrides: dict[str, Any] = pydantic.Field(default_factory=dict)
    train: bool = True
    new_tokens: int = pydantic.Field(8, ge=0, le=1_000_000)
    loss_steps: int = pydantic.Field(20, ge=0, le=1_000_000)
    learning_rate: float = pydantic.Field(1e-3, gt=0, le=10)
    corpus: str = pydantic.Field("", max_length=4096)

    _presets = pydantic.field_validator("presets")(known_presets)
    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)
    _kinds = pydantic.field_validator("attention_types")(known_kinds)
    _distinct = pydantic.field_validator("presets", "seq_lens", "batch_sizes", "dtypes", "attention_types")(distinct)

    @pydantic.field_validator("corpus")
    @classmethod
    def _corpus_is_there(cls, value: str) -> str:
        text.load(value, max_bytes=2)
        return value

    @pydantic.model_validator(mode="after")
    def _configs_fit(self) -> Params:
        for preset in self.presets:
            try:
                config = NanoConfig.from_preset(preset, **self.overrides)
            except BadInput as error:
                raise ValueError("; ".join(f"overrides: {preset}: {line}" for line in error.lines)) from None
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


@dataclass(frozen=True)
class ModelCase(Case):
    """One model on one shape; `name` is what charts call the model."""

    name: str
    preset: str
    overrides: dict[str, Any]
    attention_type: str
    seq_len: int
    batch_size: int
    dtype: str
    mode: Literal["inference", "training", "generation"]

    @property
    def config(self) -> NanoConfig:
        """The model's configuration."""
        changes = {"attention_type": self.attention_type, "dtype": self.dtype}
        return NanoConfig.from_preset(self.preset, **self.overrides | changes)

    @property
    def flops(self) -> dict[str, int]:
        """Forward FLOPs by part; attention counts the pairs that its mask keeps, all of them where the input decides."""
        config = self.config
        options = attention.shared_options(config.attention_type, config.attention_options)
        shape = {"q_len": self.seq_len, "kv_len": self.seq_len, "causal": True}
        work = attention.work(config.attention_type, **shape, options=options) or attention.work("dense", **shape)
        return model_flops(config, self.batch_size, self.seq_len, work.kept)

    def __str__(self) -> str:
        """Preset, shape and mode."""
        return f"{self.name} {self.mode} n={self.seq_len} batch={self.batch_size} {self.attention_type} {self.dtype}"


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """A prompt read at once, and tokens generated one by one over its KV cache."""

    new_tokens: int

    @property
    def flops(self) -> dict[str, int]:
        """Of one token, the first after the prompt."""
        return model_flops(self.config, self.batch_size, 1, self.seq_len + 1)


@dataclass(frozen=True)
class LossCase(Case):
    """One model trained on real text for some steps."""

    interleaves: ClassVar[bool] = False  # nothing is timed

    name: str
    preset: str
    overrides: dict[str, Any]
    attention_type: str
    seq_len: int
    batch_size: int
    dtype: str
    steps: int
    learning_rate: float
    corpus: str

    config = ModelCase.config

    def __str__(self) -> str:
        """Preset and steps."""
        return f"{self.name} loss over {self.steps} steps"


def model_name(preset: str, overrides: dict[str, Any]) -> str:
    """What charts and tables call a model: a preset that was changed never goes by its bare name."""
    changed = ", ".join(f"{name} {value}" for name, value in overrides.items())
    return f"{preset} with {changed}" if changed else preset


def cases(params: Params) -> list[Case]:
    """The ceilings, each model's inference and training at each shape, then its loss at the shortest length."""
    device = resolve_device(params.device)
    modes = ("inference", "training") if params.train else ("inference",)
    result = ceiling_cases(device, params.dtypes, params.budget_s)
    for preset in params.presets:
        for kind in params.attention_types:
            for dtype in params.dtypes:
                model = (device, model_name(preset, params.overrides), preset, params.overrides, kind)
                result += [
                    ModelCase(*model, seq_len, batch_size, dtype, mode)
                    for seq_len in params.seq_lens
                    for batch_size in params.batch_sizes
                    for mode in modes
                ]
                if params.new_tokens:
                    shapes = [(n, batch) for n in params.seq_lens for batch in params.batch_sizes]
                    result += [
                        GenerationCase(*model, *shape, dtype, "generation", params.new_tokens) for shape in shapes
                    ]
                if params.loss_steps:
                    shape = (min(params.seq_lens), max(params.batch_sizes), dtype)
                    result.append(LossCase(*model, *shape, params.loss_steps, params.learning_rate, params.corpus))
    return result


def predict(case: Case, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
    """What formulas say before anything runs.

    Args:
        case: A `ModelCase`; the others have no prediction.
        ceilings: As `roofline_ms` takes them.

    Returns:
        `parameters`, `footprint` (MiB of weights), `flops` (FLOP: the forward pass, or in training forward and backward),
        `peak_memory` (MiB, lower bound: weights and logits; in training weights, gradients, AdamW's two states and
        logits with their gradient; in generation weights and the KV cache), `latency` (ms, roofline) where the ceilings are
        known; in generation `flops` and `latency` are those of one token.
    """
    if not isinstance(case, ModelCase):
        return {}
    config, flops = case.config, case.flops["total"]
    item = torch.empty((), dtype=getattr(torch, case.dtype)).element_size()
    weights = config.parameter_count * item
    logits = case.batch_size * case.seq_len * config.vocab_size * item
    training = case.mode == "training"
    work = flops * (1 + BACKWARD_FACTOR) if training else flops
    live = (2 + _ADAMW_STATES) * weights + 2 * logits if training else weights + logits
    moved = 3 * weights if training else weights
    if isinstance(case, GenerationCase):
        kept = case.batch_size * (case.seq_len + case.new_tokens)
        live = weights + 2 * config.num_layers * kept * config.kv_heads * config.head_dim * item
    predicted: dict[str, float | str] = {
        "parameters": config.parameter_count,
        "footprint": weights / MIB,
        "flops": work,
        "peak_memory": live / MIB,
    }
    if (latency := roofline_ms(work, moved, case.dtype, ceilings or {})) is not None:
        predicted["latency"] = latency
    return predicted


def unsupported(case: Case) -> str:
    """Why this machine cannot run the case; every machine can run these."""
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
    model = create_model(case.config, case.device, seed=params.seed)
    weights = tuple(model.parameters())
    predicted = predict(case, ceilings)
    count = sum(p.numel() for p in weights)
    yield exact("parameters", count, method="count", predicted=predicted["parameters"])
    footprint = sum(p.nbytes for p in weights) / MIB
    yield exact("footprint", footprint, method="count", predicted=predicted["footprint"])
    ids = _text_batch(case, params.corpus, params.seed)
    if isinstance(case, GenerationCase):
        yield from _measure_generation(case, params, model, ids[:, :-1], predicted)
    elif case.mode == "inference":
        yield from _measure_inference(case, params, model, ids[:, :-1], predicted, ceilings)
    else:
        yield from _measure_training(case, params, model, ids, predicted, ceilings)


def _measure_inference(
    case: ModelCase,
    params: Params,
    model: Transformer,
    ids: torch.Tensor,
    predicted: dict,
    ceilings: dict[str, float],
) -> Iterator[Measurement]:
    model.eval()

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            return model(ids)

    flops = int(predicted["flops"])
    yield exact("flops", flops, scope="inference")
    yield exact("flops", count_flops(forward), scope="inference", method="flop_counter", predicted=flops)
    latency = measure(
        forward,
        params.precision,
        params.budget_s,
        device=case.device,
        scope="inference",
        predicted=predicted.get("latency"),
    )
    yield latency
    yield from rate_rows(latency, flops, case.dtype, ceilings)
    yield rate("tokens_per_second", ids.numel(), latency)
    yield from measure_memory(
        forward,
        device=case.device,
        existing=(*model.parameters(), ids),
        scope="inference",
        predicted_bytes=predicted["peak_memory"] * MIB,
    )


def _measure_generation(
    case: GenerationCase, params: Params, model: Transformer, prompt: torch.Tensor, predicted: dict
) -> Iterator[Measurement]:
    """Time to the first token (the prompt read), then time per token over the cache that grows and starts over."""
    if case.seq_len + case.new_tokens > model.config.context_length:
        raise Unsupported(
            f"a prompt of {case.seq_len} and {case.new_tokens} new tokens exceed the context_length "
            f"{model.config.context_length}; shorten seq_lens or lower new_tokens"
        )
    model.eval()
    cache = KVCache(model.config, case.batch_size, case.seq_len + case.new_tokens, case.device)

    @torch.inference_mode()
    def prefill() -> torch.Tensor:
        cache.length = 0
        return model.prefill(prompt, cache).argmax(dim=-1)

    token = prefill()

    @torch.inference_mode()
    def decode() -> None:
        nonlocal token
        if cache.length == case.seq_len + case.new_tokens:
            cache.length = case.seq_len
        token = model.decode(token, cache).argmax(dim=-1)

    timing = {"precision": params.precision, "budget_s": params.budget_s, "device": case.device}
    first = measure(prefill, scope="prefill", **timing)
    yield first
    yield rate("tokens_per_second", prompt.numel(), first)
    yield exact("flops", int(predicted["flops"]), scope="decode")
    each = measure(decode, scope="decode", predicted=predicted.get("latency"), **timing)
    yield each
    yield rate("tokens_per_second", case.batch_size, each)
    buffers = [*cache.keys, *cache.values, *cache.scores]
    yield from measure_memory(
        decode,
        device=case.device,
        existing=(*model.parameters(), *buffers, prompt, token),
        scope="decode",
        predicted_bytes=predicted["peak_memory"] * MIB,
    )


def _measure_training(
    case: ModelCase,
    params: Params,
    model: Transformer,
    ids: torch.Tensor,
    predicted: dict,
    ceilings: dict[str, float],
) -> Iterator[Measurement]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, fused=True)
    loss = torch.zeros(())

    def forward() -> None:
        nonlocal loss
        loss = model.loss(ids)

    def backward() -> None:
        loss.backward()

    def optimizer_step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    phases: dict[str, Callable[[], object]] = {
        "forward": forward,
        "backward": backward,
        "optimizer_step": optimizer_step,
    }

    def step() -> None:
        for phase in phases.values():
            phase()

    flops = int(predicted["flops"])
    yield exact("flops", flops, scope="training_step")
    timings = measure_phases(phases, params.precision, params.budget_s, device=case.device)
    total = timings.pop("total")
    yield from timings.values()
    total = Measurement.from_dict(total.to_dict() | {"scope": "training_step", "predicted": predicted.get("latency")})
    yield total
    yield from rate_rows(total, flops, case.dtype, ceilings)
    yield rate("tokens_per_second", ids[:, :-1].numel(), total)
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    yield from measure_memory(
        step,
        device=case.device,
        existing=(*model.parameters(), *states, ids),
        scope="training_step",
        predicted_bytes=predicted["peak_memory"] * MIB,
    )


def _text_batch(case: ModelCase | LossCase, corpus: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return text.batch(text.load(corpus), case.batch_size, case.seq_len + 1, generator).to(case.device)


def _measure_loss(case: LossCase, seed: int) -> Measurement:
    """The loss before each step, on fresh windows of real text; the estimate is the mean of the last tenth of them."""
    model = create_model(case.config, case.device, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.learning_rate, fused=True)
    data, generator = text.load(case.corpus), torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(case.steps):
        ids = text.batch(data, case.batch_size, case.seq_len + 1, generator).to(case.device)
        loss = model.loss(ids)
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
