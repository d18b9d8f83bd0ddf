"""Define the parameters and cases of the model notebook, and parameters for your own models."""

import contextlib
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from nanolib.config import NanoConfig
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.look import look_at_code
from nanolib.measurement import BadInput, Unsupported
from nanolib.meters.machine import resolve_device
from nanolib.models import attention
from nanolib.models.training import OPTIMIZATIONS, applies
from nanolib.models.user import (
    check_name,
    context_length,
    hugging_face_config,
    runs_code,
)
from nanolib.params import Values
from nanolib.run import case as shared
from nanolib.run.case import Case
from nanolib.run.peaks import ceiling_cases

_LONGEST_NAME = 60  # Longer lists of overrides do not fit into a chart's legend.


class OwnModelParams(shared.Params):
    """Parameters of a notebook that measures presets or a model of your own.

    Subclasses add `presets` and describe the parameters for their notebook.
    """

    # This parameter sets the sequence lengths.
    LENGTHS: ClassVar[str] = "seq_lens"
    # The keys are fields of a preset, and the values are the parameters that set these fields.
    CHOSEN: ClassVar[dict[str, str]] = {}

    overrides: dict[str, Any] = Field(default_factory=dict)
    model: str = Field("", max_length=500)
    model_options: dict[str, Any] = Field(default_factory=dict)

    _model = field_validator("model")(check_name)

    def models(self) -> list[tuple[str, dict[str, Any]]]:
        """Return your own model with its options, or each preset with the overrides."""
        if self.model:
            return [(self.model, self.model_options)]
        return [(preset, self.overrides) for preset in self.presets]

    def changes(self) -> list[dict[str, Any]]:
        """Return the overrides of each configuration that the notebook makes from a preset."""
        return [self.overrides]

    @model_validator(mode="after")
    def _models_fit(self) -> Self:
        if self.model_options and not self.model:
            raise ValueError(
                "model_options: needs a model; set model, or use overrides for presets"
            )
        for name, parameter in self.CHOSEN.items():
            if name in self.overrides:
                raise ValueError(
                    f"overrides: the parameter {parameter} sets {name}; "
                    f"remove {name} from overrides"
                )
        longest = self.LENGTHS, int(np.max(getattr(self, self.LENGTHS)))
        if not self.model:
            for preset, changes in product(self.presets, self.changes()):
                check_preset(preset, changes, longest)
        elif not runs_code(self.model):
            with contextlib.suppress(Unsupported):  # The cases report a missing library.
                check_hugging_face(self.model, self.model_options, *longest)
        return self

    def look(self, cases: Sequence[Case]) -> None:
        """Run the code of your model in one process, on tensors without data, to plan all cases.

        Args:
            cases: Cases to plan.

        Raises:
            BadInput: The model does not exist.
        """
        if runs_code(self.model):
            wanted = (getattr(case, "model_case", case) for case in cases if case.runs_code)
            look_at_code(self.model, [case.planned_as for case in wanted])


def check_preset(preset: str, overrides: Values, longest: tuple[str, int]) -> None:
    """Check a preset with `overrides`: its attention, and its longest sequence.

    Args:
        preset: Key of `PRESETS`.
        overrides: Fields of `NanoConfig` that differ from the preset.
        longest: Name of the parameter that sets the longest sequence, and that length in tokens.

    Raises:
        ValueError: A value is not valid for the preset. The message begins with the name of a
            parameter.
    """
    try:
        config = NanoConfig.from_preset(preset, **overrides)
        attention.shared_options(config.attention_type, config.attention_options)
    except BadInput as error:
        raise ValueError(
            "; ".join(f"overrides: {preset}: {line}" for line in error.lines)
        ) from None
    name, tokens = longest
    if tokens > config.context_length:
        raise ValueError(
            f"{name}: {tokens} exceeds the context_length {config.context_length} of {preset}; "
            f"give a shorter length or set overrides: {{context_length: {tokens}}}"
        )


def check_hugging_face(name: str, options: Mapping[str, Any], field: str, longest: int) -> None:
    """Check the configuration of a model from the package transformers.

    Args:
        name: `hf:` and the name of a class in the package transformers.
        options: Fields of the model's configuration.
        field: Name of the parameter that sets the longest sequence.
        longest: Length of the longest sequence that the model reads, tokens.

    Raises:
        BadInput: The class does not exist, or the configuration is not valid.
        Unsupported: The package transformers is not installed.
    """
    context = context_length(hugging_face_config(name, options))
    if context is not None and longest > context:
        raise BadInput(
            f"{field}: {longest} exceeds the max_position_embeddings {context} of {name}; "
            f"shorten the sequence, or raise max_position_embeddings to {longest}"
        )


def model_name(preset: str, overrides: dict[str, Any], optimization: str = "eager") -> str:
    """Return a model's name for charts and tables, with its overrides and optimization."""
    changed = ", ".join(f"{name} {value}" for name, value in overrides.items())
    if len(changed) > _LONGEST_NAME:
        changed = f"{changed[:_LONGEST_NAME].rpartition(', ')[0]}, …"
    name = f"{preset} with {changed}" if changed else preset
    return name if optimization == "eager" else f"{name} ({optimization.replace('_', ' ')})"


class Params(OwnModelParams):
    """Parameters of the model notebook.

    Attributes:
        presets: Names in `nanolib.PRESETS`.
        model: Your own model instead of the presets, as `package.module:build` or
            `hf:LlamaForCausalLM` (extra `hf`).
        model_options: Arguments of your model's function, or of the class's configuration.
        seq_lens: Sequence lengths, tokens.
        batch_sizes: Sequences per batch.
        dtypes: Dtypes of the weights.
        attention_types: Attentions to measure.
        overrides: Fields of `NanoConfig` that differ from the preset, such as `{num_layers: 2}`.
        optimizations: Names in `nanolib.models.training.OPTIMIZATIONS`. Only `eager` and
            `cuda_graph` support generation.
        train: Whether to measure training steps too.
        new_tokens: Tokens to generate after a prompt of each sequence length, or 0 for none.
        generation_batch_sizes: Further batch sizes for generation at the longest sequence length.
    """

    NAME = "model"
    CHOSEN: ClassVar = {"dtype": "dtypes", "attention_type": "attention_types"}
    MAIN = (
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

    presets: shared.Grid[shared.Preset] = Field(["decoder_nano"])
    seq_lens: shared.Grid[shared.Length] = Field([128, 256, 512])
    batch_sizes: shared.Grid[shared.Batch] = Field([1])
    dtypes: shared.Dtypes = Field(["float32"])
    attention_types: shared.Grid[shared.Kind] = Field(["dense"])
    optimizations: shared.Grid[Literal[tuple(OPTIMIZATIONS)]] = Field(["eager"])
    train: bool = True
    new_tokens: int = Field(16, ge=0, le=1_000_000)
    generation_batch_sizes: list[shared.Batch] = Field([4, 16], max_length=64)

    def changes(self) -> list[dict[str, Any]]:
        """Return the overrides with each attention type in turn."""
        return [self.overrides | {"attention_type": kind} for kind in self.attention_types]


def cases(params: Params) -> list[Case]:
    """List the cases: peak rates, and each model in each mode."""
    device = resolve_device(params.device)
    found = ceiling_cases(device, params.dtypes, params.budget_s)
    shapes = [*product(params.seq_lens, params.batch_sizes)]
    longest = product([max(params.seq_lens)], params.generation_batch_sizes)
    uses = {"inference": shapes}
    if params.train:
        uses["training"] = shapes
    if params.new_tokens:
        uses["generation"] = [*dict.fromkeys([*shapes, *longest])]
    kinds = ["own"] if params.model else params.attention_types
    models = product(params.models(), kinds, params.dtypes, uses)
    for (preset, overrides), kind, dtype, mode in models:
        eager, new_tokens = [], 0
        if mode == "generation":
            eager, new_tokens = ["eager"], params.new_tokens
        optimizations = dict.fromkeys([*eager, *params.optimizations])
        for optimization, shape in product(optimizations, uses[mode]):
            if applies(optimization, mode, dtype):
                name = model_name(preset, overrides, optimization)
                model = (device, name, preset, overrides, kind, *shape, dtype)
                found.append(ModelCase(*model, mode, optimization, new_tokens))
    return found
