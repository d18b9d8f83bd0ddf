"""Ways to make the same model faster or smaller; each is measured against `eager`, and how far its result lies from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nanolib.measurement import Unsupported
from nanolib.models.own_code import with_own_code

Forward = Callable[[torch.Tensor], torch.Tensor]
_WARM_CALLS = 3


def _eager(model: nn.Module, forward: Forward, ids: torch.Tensor) -> Forward:
    return forward


def _compiled(mode: str) -> Callable[[nn.Module, Forward, torch.Tensor], Forward]:
    def compiled(model: nn.Module, forward: Forward, ids: torch.Tensor) -> Forward:
        # a function that was once called under a counter of FLOPs or of bytes is given up for good
        own = with_own_code(lambda ids: forward(ids))
        return _never_uncompiled(torch.compile(own, mode=mode, dynamic=False))

    return compiled


def _never_uncompiled(forward: Forward) -> Forward:
    """A compiled forward that raises where dynamo would run part of it uncompiled, beyond its limit of recompiles."""
    known: set[tuple[torch.Size, bool]] = set()

    def compiled(ids: torch.Tensor) -> torch.Tensor:
        key = ids.shape, torch.is_grad_enabled()
        if key in known:  # to change the setting takes 0.1 ms
            return forward(ids)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            out = forward(ids)
        known.add(key)
        return out

    return compiled


def _cuda_graph(model: nn.Module, forward: Forward, ids: torch.Tensor) -> Forward:
    if model.training:
        # capture needs a stream of its own, and gradients gather on it in each step: torch would warn of that each time
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        return torch.cuda.make_graphed_callables(_Module(model, forward), (ids,))
    return _captured(forward, ids)


def _captured(forward: Forward, ids: torch.Tensor) -> Forward:
    """A graph of the forward pass alone, which takes its input and leaves its output in one place each."""
    with torch.no_grad():
        graph, out = captured(lambda: forward(ids))

    def replayed(new: torch.Tensor) -> torch.Tensor:
        if new is not ids:
            ids.copy_(new)
        graph.replay()
        return out

    return replayed


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A CUDA graph of a call, and where its result lies once it is replayed. The call has been made before, to warm up."""
    graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what libraries make at a first call must not be captured
        for _ in range(_WARM_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


class _Module(nn.Module):
    """A function of a model as a module, so that the model's weights are found."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model, self._forward = model, forward

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._forward(ids)


def _checkpointed(model: nn.Module, forward: Forward, ids: torch.Tensor) -> Forward:
    if hasattr(model, "checkpointing"):
        model.checkpointing = True
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        raise Unsupported(f"{type(model).__name__} has no way to checkpoint its blocks")
    return forward


def _autocast(dtype: torch.dtype) -> Callable[[nn.Module, Forward, torch.Tensor], Forward]:
    def wrapped(model: nn.Module, forward: Forward, ids: torch.Tensor) -> Forward:
        def cast(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast(ids.device.type, dtype):
                return forward(ids)

        return cast

    return wrapped


def _autocast_checkpointed(model: nn.Module, forward: Forward, ids: torch.Tensor) -> Forward:
    return _autocast(torch.bfloat16)(model, _checkpointed(model, forward, ids), ids)


# Name → (model, its forward, example ids) → the forward to use in its place.
OPTIMIZATIONS: dict[str, Callable[[nn.Module, Forward, torch.Tensor], Forward]] = {
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
# Modes in which an optimization means anything, where that is not in inference and in training.
_MODES = {
    "eager": ("inference", "training", "generation"),
    "cuda_graph": ("inference", "training", "generation"),
    "checkpoint": ("training",),
    "autocast_bfloat16_checkpoint": ("training",),
}


def is_compiled(name: str) -> bool:
    """Whether an optimization compiles the model, in whichever mode of `torch.compile`."""
    return name.startswith("compile")


def applies(name: str, mode: str, dtype: str) -> bool:
    """Whether an optimization means anything in a mode and with weights of a type: some are for weights in float32."""
    return mode in _MODES.get(name, ("inference", "training")) and (
        dtype == "float32" or not name.startswith("autocast")
    )


def unsupported(name: str, device: str) -> str:
    """Why a device has no such optimization; empty when it has."""
    kind = torch.device(device).type
    if name == "cuda_graph" and kind != "cuda":
        return f"CUDA graphs need a CUDA device, and this is {kind}"
    if name == "compile_reduce_overhead" and kind != "cuda":
        return f"reduce-overhead is compile with CUDA graphs, and this is {kind}; use compile"
    return ""


def optimize(name: str, model: nn.Module, forward: Forward, ids: torch.Tensor) -> Forward:
    """The forward of `model` under an optimization.

    Args:
        name: A key of `OPTIMIZATIONS`.
        model: Whose weights they are.
        forward: ids → logits.
        ids: What it will be called with: shape and device count.

    Raises:
        Unsupported: This machine or this model has no such thing.
    """
    if reason := unsupported(name, ids.device.type):
        raise Unsupported(reason)
    return OPTIMIZATIONS[name](model, forward, ids)
