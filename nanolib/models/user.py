"""A user's own model, named in the parameters: `package.module:build`, or `hf:LlamaForCausalLM` with random weights."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import logging
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from nanolib.measurement import BadInput, Unsupported, did_you_mean, shown
from nanolib.models.casting import cast
from nanolib.models.twins import imported

_HF = "hf:"
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")  # what transformers' configurations call it


def runs_code(name: str) -> bool:
    """Whether building the model that a parameter names runs code of the user's; transformers' classes are no such code."""
    return bool(name) and not name.startswith(_HF)


def check_name(name: str) -> None:
    """Look at the form of a model's name, and for its package, without running anything of it.

    Raises:
        BadInput: It names no function, or the package is not there.
    """
    if not runs_code(name):
        return
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise BadInput(f"model: {shown(name)} names no function; write package.module:build, or hf:LlamaForCausalLM")
    package = module.partition(".")[0]  # a package's own modules cannot be looked for without running it
    try:
        found = PathFinder.find_spec(package, [str(Path.cwd())]) or importlib.util.find_spec(package)
    except ValueError:  # of what was never imported from anywhere
        found = None
    if found is None:
        raise BadInput(f"model: {shown(name)}: there is no module {package!r}; install it or start where it lies")


def resolve(name: str) -> Callable[..., nn.Module]:
    """What builds the model that a parameter names; a module of the user's is imported, and so run.

    Args:
        name: `package.module:build`, imported from the working directory or the environment; or `hf:` and a class of transformers.

    Returns:
        A function that takes the model's options and gives a module: int64 ids [batch, length] → logits [batch, length, vocab], an
        object that has them as `logits`, or a tuple that begins with them.

    Raises:
        BadInput: There is no such thing, or it cannot be imported.
        Unsupported: transformers is not installed.
    """
    if not runs_code(name):
        return _hugging_face(name)
    check_name(name)
    module_name, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        build = getattr(imported(module_name), function)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"model: {name!r}: there is no module {error.name!r}; install it or start where it lies"
        ) from None
    except AttributeError:
        raise BadInput(
            f"model: {name!r}: {module_name} has no {function!r}; name a function that returns a module"
        ) from None
    except (Exception, SystemExit) as error:
        raise BadInput(f"model: {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(build) or isinstance(build, nn.Module):
        raise BadInput(f"model: {name!r} is {type(build).__name__}; name a function that returns a module")
    return build


def missing(name: str) -> str:
    """Why an own model cannot be looked up; empty when it can."""
    try:
        resolve(name)
    except Unsupported as error:
        return str(error)
    return ""


def _hugging_face_class(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise Unsupported('transformers is not installed; in the checkout: pip install -e ".[hf]"') from None
    class_name = name.removeprefix(_HF)
    try:
        with closed_off():
            found = getattr(transformers, class_name, None)
            config_class = getattr(found, "config_class", None)
    except (ImportError, RuntimeError) as error:  # a class that needs what is not installed
        raise BadInput(f"model: {shown(name)} cannot be imported: {error}") from None
    if config_class is None:
        raise BadInput(f"model: transformers has no model class {shown(class_name)}; use one such as LlamaForCausalLM")
    return found


def _hugging_face(name: str) -> Callable[..., nn.Module]:
    found = _hugging_face_class(name)

    def build(**options: Any) -> nn.Module:
        with closed_off():
            return found(found.config_class(**options))

    return build


@contextlib.contextmanager
def closed_off() -> Iterator[None]:
    """Nothing is fetched, since weights are random and what would be is a mistake; nothing is logged between our lines."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        with silent():
            yield
    finally:
        constants.HF_HUB_OFFLINE = before


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
    for option, value in options.items():
        if option not in known and not _reads(model_class, option):
            hint = did_you_mean(option, known, "leave it out")
            raise BadInput(f"model_options: {shown(option)} is no field of {config_class.__name__}; {hint}")
        if option == "use_pretrained_backbone" or (option == "attn_implementation" and "/" in str(value)):
            raise BadInput(f"model_options: {option} {shown(value)} asks for a download; leave it out")
        if option == "attn_implementation" and value == "flex_attention":  # its kernel crashes on tensors without data
            raise BadInput(f"model_options: {option} {shown(value)} cannot be planned; use sdpa or eager")
    try:
        with closed_off():
            config = config_class(**options)
            config.get_text_config()
    except Exception as error:
        raise BadInput(f"model_options: {name} does not take {shown(dict(options))}: {cause(error)}") from None
    return config


def layers_field(config: Any) -> str:
    """The field of a configuration that says how many blocks there are; empty where nobody knows."""
    known = config.to_dict()
    return next((name for name in _LAYERS if isinstance(known.get(name), int)), "")


def _fields(config_class: Any) -> list[str]:
    """What a configuration takes; it would keep any other name in silence."""
    names = {name for base in config_class.__mro__ for name in inspect.signature(base.__init__).parameters}
    names |= {"attn_implementation", *getattr(config_class, "attribute_map", {})}
    with contextlib.suppress(Exception):  # one that is made of others has no defaults
        names |= vars(config_class()).keys()
    return sorted(name for name in names - {"self", "args", "kwargs"} if not name.startswith("_"))


def _reads(model_class: type, option: str) -> bool:
    """Whether a model's code reads a field that its configuration does not declare, as many read `head_dim`."""
    source = inspect.getsource(sys.modules[model_class.__module__])
    return re.search(rf"\bconfig(\.|, [\"']){re.escape(option)}\b", source) is not None


def cause(error: BaseException) -> str:
    """The kind of an exception, and what it says."""
    return f"{type(error).__name__}: {error}"


def predicts_tokens(model: nn.Module) -> bool:
    """Whether the output has a logit for each token of the vocabulary; what is none of transformers' is taken at its word."""
    head = getattr(model, "get_output_embeddings", None)
    return head is None or head() is not None


def build_model(
    name: str, options: Mapping[str, Any], device: str | torch.device, dtype: str, seed: int | None = None
) -> nn.Module:
    """The model that a parameter names, in training mode.

    Raises:
        BadInput: It cannot be built with these options, or is no module.
        Unsupported: What it needs is not installed.
    """
    with _left_as_it_was(), torch.random.fork_rng(devices=[], enabled=seed is not None):
        build = resolve(name)
        if seed is not None:
            torch.manual_seed(seed)
        try:
            with torch.device(device):
                model = build(**copy.deepcopy(dict(options)))  # which it may use up
        except (TypeError, ValueError, BadInput) as error:
            raise BadInput(f"model_options: {name} does not take {shown(dict(options))}: {error}") from error
    _check_built(name, model, torch.device(device))
    if any(p.device.type != torch.device(device).type for p in model.parameters()):  # it did not ask where it is built
        model = model.to(device)
    return cast(model, getattr(torch, dtype)).train()


_BUILT: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def _check_built(name: str, model: Any, device: torch.device) -> None:
    """Refuse what cannot be measured, or not again.

    Raises:
        BadInput: As `build_model`.
    """
    told = f"model: {name!r} returned"
    if not isinstance(model, nn.Module):
        raise BadInput(f"{told} {type(model).__name__}; return a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise BadInput(
            f"{told} a ScriptModule, whose parts cannot be followed; return the module that it was made from"
        )
    if _BUILT.get(id(model)) is model:
        raise BadInput(f"{told} the module that it has returned before; build another in each call")
    held = (*model.parameters(), *model.buffers())
    if any(map(nn.parameter.is_lazy, held)):
        raise BadInput(f"{told} lazy modules, whose shapes nobody knows; call it once with ids, in your function")
    if device.type != "meta" and any(x.device.type == "meta" for x in held):
        raise BadInput(f"{told} weights on the device meta, which holds no data; build them without it, or fill them")
    _BUILT[id(model)] = model


@contextlib.contextmanager
def _left_as_it_was() -> Iterator[None]:
    """What code of the user's sets for the whole process is put back: other cases are measured there too."""
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_device()
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        if torch.get_num_threads() != before[1]:
            torch.set_num_threads(before[1])
        torch.set_grad_enabled(before[2])
        if torch.get_default_device() != before[3]:
            torch.set_default_device(None)


@contextlib.contextmanager
def _one_sequence_per_row(ids: torch.Tensor) -> Iterator[None]:
    """Without data transformers cannot look whether a row holds several sequences, and makes a mask that no run has."""
    masks = sys.modules.get("transformers.masking_utils")
    if not isinstance(ids, FakeTensor) or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    before, masks.find_packed_sequence_indices = masks.find_packed_sequence_indices, lambda position_ids: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = before


def logits_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ids → logits of a model of any source: what it returns, has as `logits`, or returns first; a cache is left out."""
    cacheless = {}
    if hasattr(getattr(model, "config", None), "use_cache"):
        taken = inspect.signature(model.forward).parameters.values()
        if any(one.name == "use_cache" or one.kind is one.VAR_KEYWORD for one in taken):
            cacheless = {"use_cache": False}

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with _one_sequence_per_row(ids):
            out = model(ids, **cacheless)
        if isinstance(out, tuple | list):  # beside a loss, as many small models return them
            return out[0]
        return out.get("logits", out) if isinstance(out, dict) else getattr(out, "logits", out)

    return logits
