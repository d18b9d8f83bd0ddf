"""A user's own model, named in the parameters: `package.module:build`, or `hf:LlamaForCausalLM` with random weights."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanolib.measurement import BadInput, Unsupported
from nanolib.models.casting import cast
from nanolib.models.transformer import Transformer

_HF = "hf:"


def resolve(name: str) -> Callable[..., nn.Module]:
    """What builds the model that a parameter names.

    Args:
        name: `package.module:build`, imported from the working directory or the environment; or `hf:` and a class of transformers.

    Returns:
        A function that takes the model's options and gives a module: int64 ids [batch, length] → logits [batch, length, vocab], or
        an object that has them as `logits`.

    Raises:
        BadInput: There is no such thing, or it cannot be imported.
        Unsupported: transformers is not installed.
    """
    if name.startswith(_HF):
        return _hugging_face(name.removeprefix(_HF))
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        raise BadInput(f"model: {name!r} names no function; write package.module:build, or hf:LlamaForCausalLM")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        build = getattr(importlib.import_module(module_name), function)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"model: {name!r}: there is no module {error.name!r}; install it or start where it lies"
        ) from None
    except AttributeError:
        raise BadInput(
            f"model: {name!r}: {module_name} has no {function!r}; name a function that returns a module"
        ) from None
    except Exception as error:
        raise BadInput(f"model: {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(build):
        raise BadInput(f"model: {name!r} is {type(build).__name__}; name a function that returns a module")
    return build


def _hugging_face(class_name: str) -> Callable[..., nn.Module]:
    try:
        import transformers
    except ModuleNotFoundError:
        raise Unsupported("transformers is not installed; pip install 'nanolib[hf]'") from None
    found = getattr(transformers, class_name, None)
    if getattr(found, "config_class", None) is None:
        raise BadInput(f"model: transformers has no model class {class_name!r}; use one such as LlamaForCausalLM")

    def build(**options: Any) -> nn.Module:
        return found(found.config_class(**options))

    return build


def build_model(
    name: str, options: Mapping[str, Any], device: str | torch.device, dtype: str, seed: int | None = None
) -> nn.Module:
    """The model that a parameter names, in training mode.

    Raises:
        BadInput: It cannot be built with these options, or is no module.
        Unsupported: What it needs is not installed.
    """
    build = resolve(name)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            with torch.device(device):
                model = build(**options)
        except (TypeError, ValueError, BadInput) as error:
            raise BadInput(f"model_options: {name} does not take {dict(options)!r}: {error}") from error
    if not isinstance(model, nn.Module):
        raise BadInput(f"model: {name!r} returned {type(model).__name__}; return a torch.nn.Module")
    if any(p.device.type != torch.device(device).type for p in model.parameters()):  # it did not ask where it is built
        model = model.to(device)
    return cast(model, getattr(torch, dtype)).train()


def logits_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ids → logits of a model of any source; its cache, if it makes one, is left out."""
    cacheless = {"use_cache": False} if hasattr(getattr(model, "config", None), "use_cache") else {}

    def logits(ids: torch.Tensor) -> torch.Tensor:
        out = model(ids, **cacheless)
        return getattr(out, "logits", out)

    return logits


_LLAMA_NAMES = {
    "embedding.": "model.embed_tokens.",
    "blocks.": "model.layers.",
    ".attention.out_proj.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".attention_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".mlp.gate.": ".mlp.gate_proj.",
    ".mlp.up.": ".mlp.up_proj.",
    ".mlp.down.": ".mlp.down_proj.",
    "norm.weight": "model.norm.weight",
    "head.": "lm_head.",
}


def llama_like(model: Transformer) -> nn.Module:
    """Hugging Face's Llama of the same shape with a copy of the same weights: the two compute the same.

    Args:
        model: Dense, with RoPE and SwiGLU.

    Raises:
        BadInput: Llama has no such parts.
        Unsupported: transformers is not installed.
    """
    config = model.config
    if config.mlp != "swiglu" or config.positional != "rope" or config.attention_type != "dense":
        raise BadInput("model: Llama is dense, with RoPE and SwiGLU; give a config with mlp: swiglu, positional: rope")
    options = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": config.tie_embeddings,
    }
    device = model.embedding.weight.device
    llama = build_model("hf:LlamaForCausalLM", options, device, config.dtype)
    weights = {}
    for name, x in model.state_dict().items():
        renamed = name
        for ours, theirs in _LLAMA_NAMES.items():
            if renamed.startswith(ours) or (ours.startswith(".") and ours in renamed):
                renamed = renamed.replace(ours, theirs, 1)
        weights[renamed] = x
    llama.load_state_dict(weights)
    return llama.train(model.training)
