"""The model notebook's parameters and grid: inference, training, generation and the loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import pydantic

from nanolib.experiments.model.case import GenerationCase, Mode, ModelCase, model_name
from nanolib.experiments.model.loss_case import LossCase
from nanolib.experiments.model.own_model import OwnModelParams, check_own
from nanolib.meters.machine import resolve_device
from nanolib.models.optimize import OPTIMIZATIONS, applies
from nanolib.run import params as shared
from nanolib.run.case import Case
from nanolib.run.params import (
    distinct,
    fitting_config,
    known,
    known_corpus,
    known_dtypes,
    known_kinds,
    known_presets,
)
from nanolib.run.peaks_case import ceiling_cases


class Params(OwnModelParams):
    """Parameters of the model notebook.

    Attributes:
        presets: Names in `nanolib.PRESETS`.
        model: A model of your own in the presets' place: `package.module:build`, or `hf:LlamaForCausalLM` (extra `hf`).
        model_options: What that function, or that class's configuration, takes.
        seq_lens: Sequence lengths, tokens.
        batch_sizes: Sequences per batch.
        dtypes: Types of the weights.
        attention_types: Attention kinds.
        overrides: Fields of `NanoConfig` that differ from the preset, such as `{num_layers: 2}`.
        optimizations: Names in `nanolib.models.optimize.OPTIMIZATIONS`; generation is eager, or by `cuda_graph`.
        train: Whether to measure training steps too.
        new_tokens: Tokens generated one by one after a prompt of each sequence length; 0 for none.
        generation_batch_sizes: More batches of generation, after a prompt of the longest sequence length.
        determinism: Whether to compare logits run to run, alone and in a batch, and by prefill and by decode.
        loss_steps: Steps of training on real text whose loss is recorded; 0 for none.
        learning_rate: Of AdamW, for those steps.
        corpus: A text file or folder; empty means the standard library's sources.
    """

    NAME: ClassVar[str] = "model"
    MAIN: ClassVar = (
        "presets",
        "model",
        "model_options",
        "seq_lens",
        "batch_sizes",
        "dtypes",
        "attention_types",
        "overrides",
        "optimizations",
        "train",
        "new_tokens",
        "device",
        "budget_s",
        "label",
    )

    presets: list[str] = pydantic.Field(["decoder_nano"], min_length=1)
    model: str = pydantic.Field("", max_length=500)
    model_options: dict[str, Any] = pydantic.Field(default_factory=dict)
    seq_lens: list[shared.Length] = pydantic.Field([128, 256, 512], min_length=1, max_length=64)
    batch_sizes: list[shared.Batch] = pydantic.Field([1], min_length=1, max_length=64)
    dtypes: list[str] = pydantic.Field(["float32"], min_length=1)
    attention_types: list[str] = pydantic.Field(["dense"], min_length=1)
    overrides: dict[str, Any] = pydantic.Field(default_factory=dict)
    optimizations: list[str] = pydantic.Field(["eager"], min_length=1)
    train: bool = True
    new_tokens: int = pydantic.Field(16, ge=0, le=1_000_000)
    generation_batch_sizes: list[shared.Batch] = pydantic.Field([4, 16], max_length=64)
    determinism: bool = True
    loss_steps: int = pydantic.Field(20, ge=0, le=1_000_000)
    learning_rate: float = pydantic.Field(1e-3, gt=0, le=10)
    corpus: str = pydantic.Field("", max_length=4096)
    grids: ClassVar = (
        ("presets", "seq_lens", "batch_sizes", "dtypes", "attention_types", "optimizations"),
    )

    _presets = pydantic.field_validator("presets")(known_presets)
    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)
    _kinds = pydantic.field_validator("attention_types")(known_kinds)
    _distinct = pydantic.field_validator(
        "presets",
        "seq_lens",
        "batch_sizes",
        "dtypes",
        "attention_types",
        "optimizations",
        "generation_batch_sizes",
    )(distinct)

    _optimizations = pydantic.field_validator("optimizations")(
        lambda names: known(names, OPTIMIZATIONS, "optimization")
    )
    _corpus = pydantic.field_validator("corpus")(known_corpus)

    @pydantic.model_validator(mode="after")
    def _configs_fit(self) -> Params:
        check_own(self, *self.reads)
        for preset in [] if self.model else self.presets:
            for kind in self.attention_types:
                longest = ("seq_lens", max(self.seq_lens))
                asked = self.overrides | {"attention_type": kind}
                fitting_config(preset, asked, longest=longest, reads_text=True)
        return self


def cases(params: Params) -> list[Case]:
    """List the ceilings, then each model's shapes in each mode and its loss at the shortest length."""
    device = resolve_device(params.device)
    found = ceiling_cases(device, params.dtypes, params.budget_s)
    models = params.models(params.presets)
    kinds = ["own"] if params.model else params.attention_types
    for (preset, overrides), kind, dtype in itertools.product(models, kinds, params.dtypes):
        found += _model_cases(params, device, preset, overrides, kind, dtype)
        if params.loss_steps:
            model = (device, model_name(preset, overrides), preset, overrides, kind)
            shape = (min(params.seq_lens), max(params.batch_sizes), dtype)
            asked = (params.loss_steps, params.learning_rate, params.corpus)
            found.append(LossCase(*model, *shape, *asked))
    return found


def _model_cases(
    params: Params, device: str, preset: str, overrides: dict[str, Any], kind: str, dtype: str
) -> Iterator[ModelCase]:
    shapes = [*itertools.product(params.seq_lens, params.batch_sizes)]
    batches = [size for size in params.generation_batch_sizes if size not in params.batch_sizes]
    uses: dict[Mode, list[tuple[int, int]]] = {"inference": shapes}
    if params.train:
        uses["training"] = shapes
    if params.new_tokens:
        uses["generation"] = [*shapes, *((max(params.seq_lens), size) for size in batches)]
    for mode, shapes in uses.items():
        eager = ["eager"] if mode == "generation" else []
        for optimization in dict.fromkeys([*eager, *params.optimizations]):
            if not applies(optimization, mode, dtype):
                continue
            model = (device, model_name(preset, overrides, optimization), preset, overrides, kind)
            for shape in shapes:
                fields = (*model, *shape, dtype, mode, optimization)
                if mode == "generation":
                    yield GenerationCase(*fields, params.new_tokens)
                else:
                    yield ModelCase(*fields)
