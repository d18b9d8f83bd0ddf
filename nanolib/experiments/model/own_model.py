"""What the parameters of notebooks that take your own model share."""

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


def valid_model(name: str) -> str:
    """Check that a name has the form of your own model's, without running code.

    Raises:
        ValueError: The name has another form.
    """
    try:
        check_name(name)
    except BadInput as error:
        raise ValueError(error.lines[0].removeprefix("model: ")) from None
    return name


class OwnModelParams(shared.Params):
    """Parameters of a notebook that declares `model` and `model_options`."""

    LENGTHS: ClassVar[str] = "seq_lens"  # the parameter with the sequence lengths

    _model = pydantic.field_validator("model", check_fields=False)(valid_model)

    @property
    def reads(self) -> tuple[int, str]:
        """The longest sequence that the model reads, tokens, and its parameter."""
        return int(np.max(getattr(self, self.LENGTHS))), self.LENGTHS

    def models(self, presets: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
        """Your own model with its options, or each preset with the overrides."""
        return (
            [(self.model, self.model_options)]
            if self.model
            else [(preset, self.overrides) for preset in presets]
        )

    def look(self, cases: Sequence[Case]) -> None:
        """Look once at a model that is your code, for all cases that will be measured.

        Raises:
            BadInput: There is no such model.
        """
        if runs_code(self.model):
            known = [case.model_case.planned_as for case in cases if hasattr(case, "model_case")]
            look_at_code(self.model, known)


def check_own(params: Any, longest: int, field: str = "seq_lens") -> None:
    """Check that `model` and `model_options` fit together, without running your code.

    Args:
        params: Of a notebook.
        longest: The longest sequence that the model reads, tokens.
        field: The parameter with that length.

    Raises:
        ValueError: Options without a model.
        BadInput: As `check_hugging_face`.
    """
    if params.model_options and not params.model:
        raise ValueError(
            "model_options: there is no model to take them; set model, or use overrides for presets"
        )
    if not params.model or runs_code(params.model):
        return
    with contextlib.suppress(Unsupported):  # its cases report it
        config = check_hugging_face(params.model, params.model_options, longest, field)
        vocabulary = getattr(config.get_text_config(), "vocab_size", text.VOCAB_SIZE)
        if vocabulary < text.VOCAB_SIZE:
            raise BadInput(
                f"model_options: vocab_size {vocabulary} cannot hold the {text.VOCAB_SIZE} bytes of the text; raise it"
            )


def check_hugging_face(name: str, options: Mapping[str, Any], longest: int, field: str) -> Any:
    """Check the configuration of a model of transformers.

    Args:
        name: `hf:` and a class.
        options: Fields of its configuration.
        longest: The longest sequence that the model reads, tokens.
        field: The parameter with that length.

    Returns:
        The configuration.

    Raises:
        BadInput: There is no such class, it reads two sequences, or its context is too small.
        Unsupported: transformers is not installed.
    """
    config = hugging_face_config(name, options)
    context, layers = context_length(config), layers_field(config)
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
    refused = "" if "input_ids" in read else "no ids of tokens"
    if "decoder_input_ids" in read:
        refused = "two sequences"
    if refused:
        raise BadInput(
            f"model: {name} reads {refused}; use a class that reads ids of one sequence, such as LlamaForCausalLM"
        )
    return config
