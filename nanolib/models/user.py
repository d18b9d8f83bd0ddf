"""A user's own model, named in the parameters: `package.module:build`, or `hf:LlamaForCausalLM` with random weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from nanolib.measurement import BadInput, Unsupported, did_you_mean, shown
from nanolib.models.functions import cause, check_function, imported

_HF = "hf:"
_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
)  # what transformers' configurations call it
_ONE_SEQUENCE = "nanolib_one_sequence"  # our name for SDPA in transformers' register of attention


def runs_code(name: str) -> bool:
    """Whether building the model that a parameter names runs code of the user's; transformers' classes are no such code."""
    return bool(name) and not name.startswith(_HF)


def check_name(name: str) -> None:
    """Check the form of a model's name, without running anything of it.

    Raises:
        BadInput: It names no function.
    """
    if runs_code(name):
        check_function("model", name, ", or hf:LlamaForCausalLM")


def resolve(name: str) -> Callable[..., nn.Module]:
    """What builds the model that a parameter names; a module of the user's is imported, and so run.

    Args:
        name: `package.module:build`, imported from the working directory or the environment; or `hf:` and a class of transformers.

    Returns:
        A function that takes the model's options and gives a module: int64 ids [batch, length] → logits [batch, length, vocab], an
        object that has them as `logits`, or a tuple that begins with them.

    Raises:
        BadInput: There is no such module, function or class.
        Unsupported: transformers is not installed.
    """
    if runs_code(name):
        return imported("model", name)
    return functools.partial(_build_hugging_face, _hugging_face_class(name))


def build_model(
    name: str,
    options: Mapping[str, Any],
    device: str | torch.device,
    dtype: str,
    seed: int | None = None,
) -> nn.Module:
    """Build a model of the user's own.

    Args:
        name: As `resolve` takes it.
        options: What its function, or its class's configuration, takes.
        device: Where.
        dtype: torch's default type while it is built; weights that are of another are converted.
        seed: Draws the weights from a generator of their own.

    Returns:
        The model, in training mode.

    Raises:
        BadInput: As `resolve`.
        Unsupported: transformers is not installed.
        TypeError: What was built is no module.
    """
    build, wanted = resolve(name), getattr(torch, dtype)
    with fresh_weights(device, wanted, seed):
        model = build(**copy.deepcopy(dict(options)))  # which it may use up
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name} returned {type(model).__name__}; return a torch.nn.Module")
    weights = list(model.parameters())
    if any(weight.is_floating_point() and weight.dtype is not wanted for weight in weights):
        model = model.to(wanted)
    if any(weight.device.type != torch.device(device).type for weight in weights):
        model = model.to(device)
    return model.train()


@contextlib.contextmanager
def fresh_weights(
    device: str | torch.device, dtype: torch.dtype, seed: int | None
) -> Iterator[None]:
    """Make tensors on this device and of this type by default, drawn from a generator of their own if there is a seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[], enabled=seed is not None), torch.device(device):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(before)


def missing(name: str) -> str:
    """Why a class of transformers cannot be looked up; empty when it can."""
    try:
        resolve(name)
    except Unsupported as error:
        return str(error)
    return ""


def _hugging_face_class(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise Unsupported(
            'transformers is not installed; in the checkout: pip install -e ".[hf]"'
        ) from None
    class_name = name.removeprefix(_HF)
    try:
        found = getattr(transformers, class_name, None)
        config_class = getattr(found, "config_class", None)
    except (ImportError, RuntimeError) as error:  # a class that needs what is not installed
        raise BadInput(f"model: {shown(name)} cannot be imported: {error}") from None
    if config_class is None:
        raise BadInput(
            f"model: transformers has no model class {shown(class_name)}; use one such as LlamaForCausalLM"
        )
    return found


def _build_hugging_face(model_class: Any, **options: Any) -> nn.Module:
    with silent():
        model = model_class(model_class.config_class(**options))
        if (
            isinstance(next(model.parameters(), None), FakeTensor)
            and model.config._attn_implementation == "sdpa"
        ):
            _attend_to_one_sequence(model)
    return model


def _attend_to_one_sequence(model: Any) -> None:
    """Let a model without data make the masks of a run: it cannot look whether a row holds several sequences.

    transformers would then make a mask of n × n that no run has.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def mask(
        *args: Any, allow_is_causal_skip: bool = True, use_vmap: bool = False, **more: Any
    ) -> Any:
        # a mask function of the model's own comes with `use_vmap`; a guess at several sequences does not
        return sdpa_mask(
            *args,
            allow_is_causal_skip=allow_is_causal_skip or not use_vmap,
            use_vmap=use_vmap,
            **more,
        )

    AttentionInterface.register(_ONE_SEQUENCE, sdpa_attention_forward)
    AttentionMaskInterface.register(_ONE_SEQUENCE, mask)
    model.set_attn_implementation(_ONE_SEQUENCE)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Nothing is logged between our lines."""
    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logged)


def hugging_face_config(name: str, options: Mapping[str, Any]) -> Any:
    """The configuration of one of transformers' models.

    Args:
        name: `hf:` and a class.
        options: Fields of its configuration.

    Raises:
        BadInput: There is no such class, or it takes no such options.
        Unsupported: transformers is not installed.
    """
    model_class = _hugging_face_class(name)
    config_class = model_class.config_class
    known = _fields(config_class)
    source = inspect.getsource(
        sys.modules[model_class.__module__]
    )  # some read what no configuration declares
    for option, value in options.items():
        if option not in known and f"config.{option}" not in source and f'"{option}"' not in source:
            hint = did_you_mean(option, known, "leave it out")
            raise BadInput(
                f"model_options: {shown(option)} is no field of {config_class.__name__}; {hint}"
            )
        refused = option == "attn_implementation" and (
            "/" in str(value) or value == "flex_attention"
        )
        if refused:  # a download; and a kernel that crashes on tensors without data
            raise BadInput(
                f"model_options: {option} {shown(value)} cannot be planned; use sdpa or eager"
            )
    try:
        with silent():
            config = config_class(**options)
            config.get_text_config()
    except Exception as error:
        raise BadInput(
            f"model_options: {name} does not take {shown(dict(options))}: {cause(error)}"
        ) from None
    return config


def _fields(config_class: Any) -> list[str]:
    """What a configuration takes; it would keep any other name in silence."""
    names = {
        name
        for base in config_class.__mro__
        for name in inspect.signature(base.__init__).parameters
    }
    names |= {"attn_implementation", *getattr(config_class, "attribute_map", {})}
    return sorted(name for name in names - {"self", "args", "kwargs"} if not name.startswith("_"))


def layers_field(config: Any) -> str:
    """The field of a configuration that says how many blocks there are; empty where nobody knows."""
    known = config.to_dict()
    return next((name for name in _LAYERS if isinstance(known.get(name), int)), "")


def context_length(config: Any) -> int | None:
    """The longest sequence of a model of transformers, tokens; None where nothing bounds it."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def predicts_tokens(model: nn.Module) -> bool:
    """Whether the output has a logit for each token of the vocabulary; what is none of transformers' is taken at its word."""
    head = getattr(model, "get_output_embeddings", None)
    return head is None or head() is not None


def logits_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ids → logits of a model of any source: what it returns, has as `logits`, or returns first; a cache is left out."""
    cacheless = {}
    if hasattr(getattr(model, "config", None), "use_cache"):
        taken = inspect.signature(model.forward).parameters.values()
        if any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in taken):
            cacheless = {"use_cache": False}

    def logits(ids: torch.Tensor) -> torch.Tensor:
        out = model(ids, **cacheless)
        if isinstance(out, tuple | list):  # with a loss, as many small models return them
            return out[0]
        return out.get("logits", out) if isinstance(out, dict) else getattr(out, "logits", out)

    return logits
