"""Optimize a model's forward pass by compilation, a CUDA graph, checkpointing or autocast."""

import itertools
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanolib.measurement import Unsupported

Forward = Callable[[Tensor], Tensor]
_COPIES = itertools.count()
_STEPS = ("inference", "training")
# Modes to which each optimization applies.
OPTIMIZATIONS = {
    "eager": (*_STEPS, "generation"),
    "compile": _STEPS,
    "compile_reduce_overhead": _STEPS,
    "compile_max_autotune": _STEPS,
    "cuda_graph": ("generation",),
    "checkpoint": ("training",),
    "autocast_bfloat16": _STEPS,
    "autocast_bfloat16_checkpoint": ("training",),
}


def is_compiled(name: str) -> bool:
    """Return whether an optimization compiles the model, in any mode of `torch.compile`."""
    return name.startswith("compile")


def applies(name: str, mode: str, dtype: str) -> bool:
    """Return whether an optimization applies to a mode and to weights of a dtype."""
    return mode in OPTIMIZATIONS[name] and (dtype == "float32" or not name.startswith("autocast"))


def unsupported_reason(name: str, device: str) -> str:
    """Return why a device does not support an optimization, or an empty string."""
    kind = torch.device(device).type
    if kind == "cuda" or name not in ("cuda_graph", "compile_reduce_overhead"):
        return ""
    return f"{name} needs a CUDA device, and the device is {kind}; leave it out"


def optimize(name: str, model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
    """Return the optimized forward function of a model.

    Args:
        name: Name of the optimization, a key of `OPTIMIZATIONS` for inference or training.
        model: Model whose weights `forward` uses.
        forward: Function from ids to logits.
        ids: Example ids, with the shape and the device of all calls.

    Raises:
        Unsupported: This machine or this model does not support the optimization.
    """
    if reason := unsupported_reason(name, ids.device.type):
        raise Unsupported(reason)
    if is_compiled(name):
        # An error is better than a model of which dynamo silently leaves a part uncompiled.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        mode = name.removeprefix("compile").removeprefix("_").replace("_", "-") or "default"
        # Dynamo never compiles a function that has once run under a FLOP counter.
        return torch.compile(copy_function(lambda ids: forward(ids)), mode=mode, dynamic=False)
    if name.endswith("checkpoint"):
        _checkpoint(model)
    if name.startswith("autocast"):
        return torch.autocast(ids.device.type, torch.bfloat16)(forward)
    return forward


def copy_function(function: types.FunctionType) -> types.FunctionType:
    """Copy a function, so that torch.compile caches the graphs of the copy separately.

    Dynamo caches graphs by the code of a function. Each call searches all graphs of the code, and
    after eight graphs dynamo stops compiling. Calls that nanolib times in turns must not share a
    cache.

    Args:
        function: A Python function that is not a method.
    """
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_COPIES)}")
    own = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def capture_graph(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a call in a CUDA graph, after a few warm-up calls."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # Libraries allocate memory here, outside the graph.
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return graph


def _checkpoint(model: nn.Module):
    """Make the backward pass compute the activations of blocks again."""
    if hasattr(model, "checkpointing"):
        model.checkpointing = True
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        raise Unsupported(
            f"{type(model).__name__} has no activation_checkpointing_enable; "
            "remove checkpoint from optimizations"
        )
