"""A model of the user's own, looked at before it is measured: what is wrong with it is told once, not case by case.

What transformers builds from a configuration is looked at wherever parameters are checked. Code of the
user's is run where something is measured alone; `python -m nanolib.run.own_model` runs it for a command that is about to.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nanolib.measurement import BadInput, Unsupported, printable, shown
from nanolib.meters.fakes import NEEDS_DATA, Fakes, OutOfTable
from nanolib.meters.memory import fake_tensors
from nanolib.models import text
from nanolib.models.user import (
    build_model,
    cause,
    check_name,
    closed_off,
    hugging_face_config,
    layers_field,
    logits_of,
    runs_code,
    silent,
)
from nanolib.run.outcome import LookTimeout, is_out_of_memory, time_to_look
from nanolib.run.process import python

_START_S = 60.0  # what importing torch may take on a busy machine
_REFUSED = 3  # the exit code that says so
_LOW = 2  # blocks that are looked at, of many: more of them take long, and say no more


def known_model(value: str) -> str:
    """`value`, when it may name a model of the user's own; a validator of the field `model`.

    Raises:
        ValueError: It may not.
    """
    try:
        check_name(value)
    except BadInput as error:
        raise ValueError(error.lines[0].removeprefix("model: ")) from None
    return value


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
        raise ValueError("model_options: there is no model to take them; set model, or use overrides for presets")
    if params.model and not runs_code(params.model):
        with contextlib.suppress(Unsupported):  # its cases will say so
            check_hugging_face(params.model, params.model_options, longest, field)


def sources(params: Any, presets: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """What is built: the user's own model with its options, or else each preset with the overrides."""
    if params.model:
        return [(params.model, params.model_options)]
    return [(preset, params.overrides) for preset in presets]


def check_hugging_face(name: str, options: Mapping[str, Any], longest: int, field: str = "seq_lens") -> None:
    """Look at a model of transformers, without data.

    Args:
        name: `hf:` and a class.
        options: Fields of its configuration.
        longest: The longest sequence it is given, tokens.
        field: The parameter that says so.

    Raises:
        BadInput: It cannot be built, does not read ids, or has too small a vocabulary or context; the message begins with a field.
        Unsupported: transformers is not installed.
    """
    _check_hugging_face(name, json.dumps(options), longest, field)


@functools.lru_cache(maxsize=16)
def _check_hugging_face(name: str, options_text: str, longest: int, field: str) -> None:
    options = json.loads(options_text)
    config = hugging_face_config(name, options)
    vocabulary, context = getattr(config.get_text_config(), "vocab_size", None), context_length(config)
    if vocabulary is not None and vocabulary < text.VOCAB_SIZE:
        raise BadInput(
            f"model_options: vocab_size {vocabulary} cannot hold the {text.VOCAB_SIZE} bytes of the text; raise it"
        )
    if context is not None and longest > context:
        raise BadInput(
            f"{field}: {longest} exceeds the max_position_embeddings {context} of {name}; "
            f"shorten it or set model_options: {{max_position_embeddings: {longest}}}"
        )
    layers = layers_field(config)
    if layers and getattr(config, layers) < 1:
        raise BadInput(f"model_options: {layers} {getattr(config, layers)} makes no model; give 1 or more")
    low = options | ({layers: min(getattr(config, layers), _LOW)} if layers else {})
    try:
        try:
            sequences = _sequences_read(name, low)
        except Exception:  # it may say something of each of its blocks, which are more
            sequences = _sequences_read(name, options)
    except (TypeError, ValueError, LookupError, AttributeError, ImportError, OSError, AssertionError) as error:
        raise BadInput(
            f"model: {name} with {options_text} cannot be built and read ids ({cause(error)}); use another"
        ) from None
    except RuntimeError:  # it asks for values, which are not there: running it will tell
        return
    if sequences > 1:
        raise BadInput(f"model: {name} reads two sequences; use a class that reads one, such as LlamaForCausalLM")


def _sequences_read(name: str, options: Mapping[str, Any]) -> int:
    """How many sequences of ids a model reads; one that reads one has read it. The half of two tells by its own configuration."""
    with fake_tensors(), torch.no_grad(), closed_off():
        model = build_model(name, options, "cpu", "float32").eval()
        if model.config.is_encoder_decoder:
            return 2
        logits_of(model)(torch.zeros(1, 2, dtype=torch.int64))
        return 1


def context_length(config: Any) -> int | None:
    """The longest sequence of a model of transformers, tokens; None where nothing bounds it."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def rehearse(
    name: str, options: Mapping[str, Any], longest: int = 1, field: str = "seq_lens", device: str = "cpu"
) -> None:
    """Build a model of the user's own once and let it read ids: without data, and with it where that ends in an error.

    This runs the user's code.

    Args:
        name: `package.module:build`; nothing is done with others.
        options: What that function takes.
        longest: The longest sequence it is given, tokens.
        field: The parameter that says so.
        device: Where it will be measured.

    Raises:
        BadInput: It cannot be imported or built, is no module, or cannot read so many ids of a text.
    """
    if not runs_code(name):
        return
    try:
        with fake_tensors() as fakes, silent():
            _read_once(name, options, longest, device, fakes)
        return
    except OutOfTable as error:
        if error.of_text:
            raise BadInput(f"model: {shown(name)}: {error}") from None
        raise BadInput(
            f"{field}: {longest} exceeds the {error.rows} positions of {name}; shorten it, or give the model a longer table"
        ) from None
    except BadInput:
        raise
    except (LookTimeout, SystemExit, *NEEDS_DATA):
        return  # running it will tell
    except Exception:  # an error that it may not have with data
        _read_with_data(name, options, longest, field, device)


def _read_with_data(name: str, options: Mapping[str, Any], longest: int, field: str, device: str) -> None:
    try:
        _read_once(name, options, longest, device)
    except BadInput:
        raise
    except LookTimeout:
        return  # running it will tell
    except Exception as error:
        if is_out_of_memory(error):  # shorter sequences may fit
            return
        of = f" with {shown(dict(options))}" if options else ""
        raise BadInput(
            f"model: {shown(name)}{of} cannot be built and read {longest} ids ({cause(error)}); mend it, or change "
            f"model_options or {field}"
        ) from None


def _read_once(name: str, options: Mapping[str, Any], length: int, device: str, fakes: Fakes | None = None) -> None:
    """Build it, and let it read a sequence of bytes where its time can be limited."""
    if threading.current_thread() is not threading.main_thread():
        build_model(name, options, device, "float32")
        return
    with time_to_look(), torch.no_grad():
        model = build_model(name, options, device, "float32").eval()
        ids = torch.arange(length, device=device)[None] % text.VOCAB_SIZE
        if fakes:
            fakes.holds_ids(ids, text.VOCAB_SIZE)
        logits_of(model)(ids)


def rehearse_in_process(
    name: str,
    options: Mapping[str, Any],
    timeout_s: float,
    longest: int = 1,
    field: str = "seq_lens",
    device: str = "cpu",
) -> None:
    """The same in a process of its own, for one that checks parameters and runs no code of the user's.

    Raises:
        BadInput: As `rehearse`.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):  # each case will be timed out and say so
        done = subprocess.run(
            python(__name__),
            input=json.dumps([name, options, longest, field, device]),
            capture_output=True,
            text=True,
            timeout=timeout_s + _START_S,
        )
        if done.returncode == _REFUSED:
            raise BadInput(*json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Read `rehearse`'s arguments from standard input; what is wrong is written as the last line."""
    try:
        rehearse(*json.load(sys.stdin))
    except BadInput as error:
        print()  # after what the code of the user's has printed
        print(printable(json.dumps(error.lines)))
        sys.exit(_REFUSED)


if __name__ == "__main__":
    main()
