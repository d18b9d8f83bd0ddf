"""Optimize a model's forward pass: compile it, capture it in a CUDA graph, checkpoint it, or autocast it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanolib.measurement import Unsupported
from nanolib.models.own_code import with_own_code

Forward = Callable[[Tensor], Tensor]
_WARM_CALLS = 3


def _eager(model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
    return forward


def _compiled(mode: str) -> Callable[[nn.Module, Forward, Tensor], Forward]:
    def compiled(model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
        # dynamo never compiles a function again that was once called under a counter of FLOPs or of bytes
        own = with_own_code(lambda ids: forward(ids))
        return _require_compiled(torch.compile(own, mode=mode, dynamic=False))

    return compiled


def _require_compiled(forward: Forward) -> Forward:
    """Make a compiled forward raise if dynamo reaches its recompile limit and would run a part uncompiled."""
    known: set[tuple[torch.Size, bool]] = set()

    def compiled(ids: Tensor) -> Tensor:
        key = ids.shape, torch.is_grad_enabled()
        if key in known:  # changing the setting takes 0.1 ms
            return forward(ids)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            out = forward(ids)
        known.add(key)
        return out

    return compiled


def _cuda_graph(model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
    if model.training:
        # capture uses its own stream, and gradients accumulate on it in each step: torch would warn each time
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        return torch.cuda.make_graphed_callables(_Module(model, forward), (ids,))
    with torch.no_grad():
        graph, out = captured(lambda: forward(ids))

    def replayed(new: Tensor) -> Tensor:
        if new is not ids:
            ids.copy_(new)
        graph.replay()
        return out

    return replayed


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a call in a CUDA graph.

    Return the graph, and the tensor that a replay writes its result to.
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what libraries allocate at a first call must not be captured
        for _ in range(_WARM_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


class _Module(nn.Module):
    """A forward function as a module with the model's weights."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, ids: Tensor) -> Tensor:
        return self._forward(ids)


def _checkpointed(model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
    if hasattr(model, "checkpointing"):
        model.checkpointing = True
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        raise Unsupported(f"{type(model).__name__} has no way to checkpoint its blocks")
    return forward


def _autocast(dtype: torch.dtype) -> Callable[[nn.Module, Forward, Tensor], Forward]:
    def wrapped(model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
        def cast(ids: Tensor) -> Tensor:
            with torch.autocast(ids.device.type, dtype):
                return forward(ids)

        return cast

    return wrapped


def _autocast_checkpointed(model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
    return _autocast(torch.bfloat16)(model, _checkpointed(model, forward, ids), ids)


# Name → (model, its forward, example ids) → the forward that replaces it.
OPTIMIZATIONS: dict[str, Callable[[nn.Module, Forward, Tensor], Forward]] = {
    "eager": _eager,
    "compile": _compiled("default"),
    "compile_reduce_overhead": _compiled("reduce-overhead"),
    "compile_max_autotune": _compiled("max-autotune"),
    "cuda_graph": _cuda_graph,
    "checkpoint": _checkpointed,
    "autocast_bfloat16": _autocast(torch.bfloat16),
    "autocast_bfloat16_checkpoint": _autocast_checkpointed,
    "autocast_float16": _autocast(torch.float16),
}
# Modes that an optimization applies to, if they are not inference and training.
_MODES = {
    "eager": ("inference", "training", "generation"),
    "cuda_graph": ("inference", "training", "generation"),
    "checkpoint": ("training",),
    "autocast_bfloat16_checkpoint": ("training",),
}


def is_compiled(name: str) -> bool:
    """Return whether an optimization compiles the model, in any mode of `torch.compile`."""
    return name.startswith("compile")


def applies(name: str, mode: str, dtype: str) -> bool:
    """Return whether an optimization applies to a mode and to weights of a dtype: autocast needs float32 weights."""
    return mode in _MODES.get(name, ("inference", "training")) and (
        dtype == "float32" or not name.startswith("autocast")
    )


def unsupported(name: str, device: str) -> str:
    """Return why a device does not support an optimization, or an empty string."""
    kind = torch.device(device).type
    if name == "cuda_graph" and kind != "cuda":
        return f"CUDA graphs need a CUDA device, and this is {kind}"
    if name == "compile_reduce_overhead" and kind != "cuda":
        return f"reduce-overhead is compile with CUDA graphs, and this is {kind}; use compile"
    return ""


def optimize(name: str, model: nn.Module, forward: Forward, ids: Tensor) -> Forward:
    """Return the forward of `model` under an optimization.

    Args:
        name: A key of `OPTIMIZATIONS`.
        model: Owner of the weights.
        forward: ids → logits.
        ids: Example ids, with the shape and the device of all calls.

    Raises:
        Unsupported: This machine or this model does not support it.
    """
    if reason := unsupported(name, ids.device.type):
        raise Unsupported(reason)
    return OPTIMIZATIONS[name](model, forward, ids)
