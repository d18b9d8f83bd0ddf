"""Import a user's functions, and build models, by names such as `package.module:build`."""

import contextlib
import copy
import hashlib
import importlib.util
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanolib.measurement import BadInput, Unsupported, cause, did_you_mean, quote

# The name of a function within JSON. The group is the first part of the name of its module.
_NAME = re.compile(r'"([^\W\d]\w*)(?:\.\w+)*:[^\W\d]\w*"')
_HF = "hf:"
# The code of the package `transformers` reads options from a configuration or keyword arguments.
_READ_OPTION = re.compile(r'(?:config\.|config, "|kwargs\.(?:get|pop)\(")([a-z]\w*)\b(?!\()')


def check_function(field: str, name: str, other: str = "") -> str:
    """Return a function's name after a check of its form, without importing the function.

    Args:
        field: Parameter or option that contains the name.
        name: Name of the function, such as `package.module:function`.
        other: Another valid form of the name, for the end of the error message.

    Raises:
        BadInput: The name does not have the form `package.module:function`.
    """
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise BadInput(
            f"{field}: {quote(name)} does not name a function; write package.module:function{other}"
        )
    return name


def import_callable(field: str, name: str) -> Callable[..., Any]:
    """Import the function that a parameter names, which runs the code of the function's module.

    Raises:
        BadInput: The name is not valid, the import fails, or the module has no such function.
    """
    module_name, _, function = check_function(field, name).partition(":")
    _find_in_working_directory()
    try:
        found = getattr(importlib.import_module(module_name), function, None)
    except (Exception, SystemExit) as error:  # A user's code may raise any exception.
        raise BadInput(
            f"{field}: {name!r} cannot be imported ({cause(error)}); "
            "correct its module, or start in the module's folder"
        ) from error
    if not callable(found) or isinstance(found, nn.Module):
        raise BadInput(
            f"{field}: {module_name} has no function {function!r}; name one of its functions"
        )
    return found


def _find_in_working_directory():
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)


def code_digest(values) -> str:
    """Return a hash of the source files of the user's functions that values name.

    The hash covers all files of a function's package, or the single file of a module.

    Args:
        values: Values of JSON types. Some of them may be names such as `package.module:function`.

    Returns:
        The hash, or an empty string if the values name no function that exists.
    """
    _find_in_working_directory()
    files = set()
    for name in _NAME.findall(json.dumps(values)):
        with contextlib.suppress(ImportError, ValueError):  # The run reports the missing module.
            if found := importlib.util.find_spec(name):
                folders = found.submodule_search_locations or ()
                files.update(*(Path(folder).rglob("*.py") for folder in folders))
                if found.origin:
                    files.add(Path(found.origin))
    content = b"".join(file.read_bytes() for file in sorted(filter(Path.is_file, files)))
    return hashlib.sha256(content).hexdigest()[:12] if files else ""


def runs_code(name: str) -> bool:
    """Return whether the user's own code builds the named model."""
    return bool(name) and not name.startswith(_HF)


def check_name(name: str) -> str:
    """Return a model's name after a check of its form, without running the model's code."""
    return check_function("model", name, ", or hf:LlamaForCausalLM") if runs_code(name) else name


def resolve(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds a named model.

    Args:
        name: Name of the model. `package.module:build` names a function in the working directory or
            a package, and nanolib runs the code of its module. `hf:` with the name of a class
            selects a model of the package `transformers`.

    Returns:
        Function that takes the options and returns a module. The module maps int64 ids [batch,
        length] to logits [batch, length, vocab], to an object with `.logits`, or to a tuple that
        begins with logits.

    Raises:
        BadInput: The module, function or class does not exist.
        Unsupported: The package `transformers` is not installed.
    """
    if runs_code(name):
        return import_callable("model", name)
    model_class = _hugging_face_class(name)

    def build(**options) -> nn.Module:
        with silent():
            return model_class(model_class.config_class(**options))

    return build


def build_model(
    name: str,
    options: Mapping[str, Any],
    device: str | torch.device,
    dtype: str,
    seed: int | None = None,
) -> nn.Module:
    """Build a user's own model, or a model of the package `transformers` with random weights.

    Args:
        name: Name of the model. `resolve` describes the name, and the errors.
        options: Arguments of the named function, or of the configuration of the named class.
        device: Device of the weights.
        dtype: Dtype of the weights, and torch's default dtype while the function runs.
        seed: Seed of the weights, or None to use torch's global generator.

    Returns:
        The model, in training mode.
    """
    build, wanted = resolve(name), getattr(torch, dtype)
    with fresh_weights(device, wanted, seed):
        model = build(**copy.deepcopy(dict(options)))  # The function may change its arguments.
    kind = torch.device(device).type
    if any(
        weight.device.type != kind or (weight.is_floating_point() and weight.dtype is not wanted)
        for weight in model.parameters()
    ):
        model = model.to(device, wanted)
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # Generation passes `use_cache=True`.
    return model.train()


@contextlib.contextmanager
def fresh_weights(
    device: str | torch.device, dtype: torch.dtype, seed: int | None
) -> Iterator[None]:
    """Set the default device and dtype of new tensors within the context, and any given seed."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[], enabled=seed is not None), torch.device(device):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(before)


def _hugging_face_class(name: str):
    try:
        import transformers
    except ModuleNotFoundError:
        raise Unsupported(
            'transformers is not installed; in the checkout: pip install -e ".[hf]"'
        ) from None
    class_name = name.removeprefix(_HF)
    try:
        with silent():  # The packages that transformers imports warn about parts of their own.
            found = getattr(transformers, class_name, None)
            config_class = getattr(found, "config_class", None)
    except (ImportError, RuntimeError) as error:  # A dependency of the class is not installed.
        raise BadInput(
            f"model: {quote(name)} cannot be imported ({error}); install the packages that it needs"
        ) from None
    if config_class is None:
        raise BadInput(
            f"model: transformers has no model class {quote(class_name)}; "
            "use a class such as LlamaForCausalLM"
        )
    return found


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Turn off all logging within the context."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def hugging_face_config(name: str, options: Mapping[str, Any]):
    """Build the configuration of a model of the package `transformers`.

    Args:
        name: Name of the model, `hf:` with the name of a class of the package.
        options: Fields of the configuration, and other options that the model's code reads.

    Raises:
        BadInput: The class does not exist, or does not take the options.
        Unsupported: The package `transformers` is not installed.
    """
    config_class, known = _hugging_face_class(name).config_class, list_options(name)
    for option, value in options.items():
        if option not in known:
            hint = did_you_mean(option, known, "leave it out")
            raise BadInput(
                f"model_options: {quote(option)} is not a field of {config_class.__name__}; {hint}"
            )
        # A name with a slash starts a download. flex_attention crashes on tensors without data.
        refused = "/" in str(value) or value == "flex_attention"
        if option == "attn_implementation" and refused:
            raise BadInput(
                f"model_options: memory with {option} {quote(value)} cannot be planned; "
                "use sdpa or eager"
            )
    try:
        with silent():
            config = config_class(**options)
            text = config.get_text_config()
    except Exception as error:
        raise BadInput(
            f"model_options: {name} does not take {quote(dict(options))} ({cause(error)}); "
            "change an option"
        ) from None
    encodes = config.is_encoder_decoder and not name.endswith("ForCausalLM")
    if encodes or not hasattr(text, "vocab_size"):
        raise BadInput(
            f"model: {name} does not read one sequence of tokens; use a class such as "
            "LlamaForCausalLM"
        )
    return config


def list_options(name: str) -> list[str]:
    """List the options that a configuration declares, or that the code of the class reads.

    Args:
        name: Name of the model, `hf:` with the name of a class of the package `transformers`.

    Raises:
        BadInput: The class does not exist.
        Unsupported: The package `transformers` is not installed.
    """
    model_class = _hugging_face_class(name)
    config_class = model_class.config_class  # It silently accepts names that it does not declare.
    names = {"attn_implementation", *config_class.attribute_map}
    for base in config_class.__mro__:
        names |= {*inspect.signature(base.__init__).parameters}
    for module in {base.__module__ for base in (model_class, *config_class.__mro__[:-1])}:
        names |= {*_READ_OPTION.findall(inspect.getsource(sys.modules[module]))}
    names -= {"self", "args", "kwargs"}
    return sorted(name for name in names if not name.startswith("_"))


def context_length(config) -> int | None:
    """Return a model's longest sequence in tokens, or None if its configuration has no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function from ids to logits."""

    def logits(ids: Tensor) -> Tensor:
        out = model(ids)
        if isinstance(out, tuple | list):  # Many small models return logits and a loss.
            return out[0]
        return out.get("logits", out) if isinstance(out, dict) else getattr(out, "logits", out)

    return logits
