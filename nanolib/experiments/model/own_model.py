"""What the parameters of notebooks share that take a model of the user's own."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pydantic

from nanolib.experiments.model.look import look_at_code
from nanolib.measurement import BadInput, Unsupported
from nanolib.models import text
from nanolib.models.user import (
    check_name,
    context_length,
    hugging_face_config,
    layers_field,
    resolve,
    runs_code,
)
from nanolib.run import params as shared
from nanolib.run.case import Case


class OwnModelParams(shared.Params):
    """Parameters whose notebook declares `model` and `model_options`, among its own and in their order."""

    LENGTHS: ClassVar[str] = "seq_lens"  # the parameter that says how long its sequences are

    @pydantic.field_validator("model", check_fields=False)
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        check_name(value)
        return value

    @property
    def reads(self) -> tuple[int, str]:
        """The longest sequence that a model is given, tokens, and the parameter that says so."""
        return int(np.max(getattr(self, self.LENGTHS))), self.LENGTHS

    def models(self, presets: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """What is built: the user's own model with its options, or else each preset with the overrides."""
        return (
            [(self.model, self.model_options)]
            if self.model
            else [(preset, self.overrides) for preset in presets]
        )

    def look(self, cases: Sequence[Case]) -> None:
        """Look once at a model that is code of the user's, for all cases that are going to be measured.

        Raises:
            BadInput: There is no such model.
        """
        if runs_code(self.model):
            known = [case.model_case.planned_as for case in cases if hasattr(case, "model_case")]
            look_at_code(self.model, known)


def check_own(params: Any, longest: int, field: str = "seq_lens") -> None:
    """Whether `model` and `model_options` of parameters fit together, without running code of the user's.

    Args:
        params: Of a notebook.
        longest: The longest sequence that the model is given, tokens.
        field: The parameter that says so.

    Raises:
        ValueError: Options without a model.
        BadInput: As `check_hugging_face`.
    """
    if params.model_options and not params.model:
        raise ValueError(
            "model_options: there is no model to take them; set model, or use overrides for presets"
        )
    if params.model and not runs_code(params.model):
        with contextlib.suppress(Unsupported):  # its cases will say so
            check_hugging_face(params.model, params.model_options, longest, field)


def check_hugging_face(name: str, options: Mapping[str, Any], longest: int, field: str) -> None:
    """Look at the configuration of a model of transformers.

    Args:
        name: `hf:` and a class.
        options: Fields of its configuration.
        longest: The longest sequence it is given, tokens.
        field: The parameter that says so.

    Raises:
        BadInput: There is no such class, it reads two sequences, or its vocabulary or context is too small.
        Unsupported: transformers is not installed.
    """
    config = hugging_face_config(name, options)
    vocabulary, context, layers = (
        getattr(config.get_text_config(), "vocab_size", None),
        context_length(config),
        layers_field(config),
    )
    if vocabulary is not None and vocabulary < text.VOCAB_SIZE:
        raise BadInput(
            f"model_options: vocab_size {vocabulary} cannot hold the {text.VOCAB_SIZE} bytes of the text; raise it"
        )
    if context is not None and longest > context:
        raise BadInput(
            f"{field}: {longest} exceeds the max_position_embeddings {context} of {name}; "
            f"shorten it or raise max_position_embeddings to {longest}"
        )
    if layers and getattr(config, layers) < 1:
        raise BadInput(
            f"model_options: {layers} {getattr(config, layers)} makes no model; give 1 or more"
        )
    read = inspect.signature(resolve(name).args[0].forward).parameters
    if "input_ids" not in read:
        raise BadInput(
            f"model: {name} reads no ids of tokens; use a class that does, such as LlamaForCausalLM"
        )
    if "decoder_input_ids" in read:
        raise BadInput(
            f"model: {name} reads two sequences; use a class that reads one, such as LlamaForCausalLM"
        )
