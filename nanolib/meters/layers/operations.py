"""One pass of a model, operation by operation, attention in its steps beside the fused kernel.

Every torch function that the model calls passes by here and is called as it stands, so the output is the same to the last bit.
Where the model calls the fused attention kernel, the kernel's result goes on, and QKᵀ, scale and mask, softmax and AV are computed
once more from the same inputs, timed one by one, and looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from nanolib.meters.time.stopwatch import CpuStopwatch, Stopwatch

ATTENTION_STEPS = ("qk", "scale_mask", "softmax", "av")
FUSED = "attention_fused"
ATTENTION_STATISTICS = ("attention_entropy", "attention_max_weight", "attention_sparsity")

_BY_LAST_NAME = {
    "o_proj": "out_proj",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "lm_head": "head",
    "embed_tokens": "embedding",
    "act_fn": "activation",
}
_BY_FUNCTION = {"silu": "activation", "gelu": "activation", "add": "residual", "__setitem__": "cache"}


def role_of(name: str, module: torch.nn.Module) -> str:
    """What a module does, in a word shared by models of any source: `q_proj`, `gate`, `norm`, ...; empty for a container."""
    kind = type(module).__name__.lower()
    if "norm" in kind:
        return "norm"
    if "rotary" in kind:
        return "rope"
    last = name.rsplit(".", 1)[-1]
    return "" if any(module.children()) else _BY_LAST_NAME.get(last, last)


@dataclass(frozen=True)
class OperationMark:
    """One operation.

    Attributes:
        layer: Index of the block, or of the module beside the blocks, in which it ran.
        operation: Its name.
        begin: When, a mark of the stopwatch.
        end: Until when.
    """

    layer: int
    operation: str
    begin: Any
    end: Any


class OperationTimer(TorchFunctionMode):
    """Times every torch function called within it.

    Args:
        watch: The clock, which stands still while the steps of attention are repeated and looked at.
        place: Tells where the model is: index of the layer, role of the innermost module, whether that is in an MLP.
        near_zero: An attention weight smaller than this counts as none.
        dead_ns: What it costs that a function passes by here; found out by default.

    Attributes:
        marks: What ran.
        statistics: (layer, name, value), each value one number left on the device.
    """

    def __init__(
        self,
        watch: Stopwatch,
        place: Callable[[], tuple[int, str, bool]],
        near_zero: float,
        dead_ns: int | None = None,
    ) -> None:
        super().__init__()
        self._watch, self._place, self._near_zero = watch, place, near_zero
        self._dead_ns = _dead_time_ns() if dead_ns is None else dead_ns
        self.marks: list[OperationMark] = []
        self.statistics: list[tuple[int, str, torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call it, and note how long it took."""
        watch, kwargs = self._watch, kwargs or {}
        watch.pause()
        watch.skip(self._dead_ns)
        name = getattr(func, "__name__", "")
        if name == "__get__":  # `x.shape` and its like
            watch.resume()
            return func(*args, **kwargs)
        layer, role, in_mlp = self._place()
        if func is scaled_dot_product_attention:
            out = self._attention(layer, args, kwargs)
            watch.resume()
            return out
        operation = role or ("activation" if in_mlp and name == "mul" else _BY_FUNCTION.get(name, "other"))
        watch.resume()
        begin = watch.mark()
        out = func(*args, **kwargs)
        end = watch.mark()
        watch.pause()
        self.marks.append(OperationMark(layer, operation, begin, end))
        watch.resume()
        return out

    def _attention(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The fused result; its steps count as the layer's time in its place. The watch stands still before and after."""
        out = self._timed(layer, FUSED, lambda: scaled_dot_product_attention(*args, **kwargs), counts=False)
        with torch.no_grad():
            inputs = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs
            q, k, v = (inputs[name].detach() for name in ("query", "key", "value"))
            group = q.shape[-3] // k.shape[-3] if inputs.get("enable_gqa") else 1
            k, v = (x if group == 1 else x.repeat_interleave(group, dim=-3) for x in (k, v))
            seen = _seen(inputs.get("attn_mask"), bool(inputs.get("is_causal")), q, k)
            bias = inputs.get("attn_mask")
            bias = bias if bias is not None and bias.dtype != torch.bool else None
            scale = inputs.get("scale") or q.shape[-1] ** -0.5
            scores = self._timed(layer, "qk", lambda: q @ k.mT)
            scores = self._timed(layer, "scale_mask", lambda: _scaled(scores, scale, bias, seen))
            weights = self._timed(layer, "softmax", lambda: torch.softmax(scores, dim=-1))
            self._timed(layer, "av", lambda: weights @ v)
            self._look(layer, weights, seen)
        return out

    def _timed(self, layer: int, operation: str, call: Callable[[], torch.Tensor], counts: bool = True) -> torch.Tensor:
        """Marks can be taken while the watch stands still; only what counts moves it."""
        if counts:
            self._watch.resume()
        begin = self._watch.mark()
        out = call()
        end = self._watch.mark()
        if counts:
            self._watch.pause()
        self.marks.append(OperationMark(layer, operation, begin, end))
        return out

    def _look(self, layer: int, weights: torch.Tensor, seen: torch.Tensor | None) -> None:
        """Of the pairs that are not masked: mean entropy of a query's weights (nats), mean largest one, share near zero."""
        p = weights.float()
        p = p.nan_to_num() if seen is None else p.nan_to_num().masked_fill(~seen, 0.0)
        entropy = torch.special.entr(p).sum(dim=-1).mean()
        small = p < self._near_zero
        near = small.float().mean() if seen is None else (small & seen).sum() / seen.expand_as(p).sum()
        values = (entropy, p.amax(dim=-1).mean(), near)
        self.statistics += [(layer, name, value) for name, value in zip(ATTENTION_STATISTICS, values, strict=True)]


@functools.cache
def _dead_time_ns() -> int:
    """What it costs that a function passes by, beyond what the mode itself can leave out: the way there and back."""
    x, count, watch = torch.zeros(1), 200, CpuStopwatch()
    mode = OperationTimer(watch, lambda: (0, "other", False), near_zero=0.0, dead_ns=0)

    def took() -> int:
        begin = watch.mark()
        for _ in range(count):
            torch.neg(x)
        return watch.mark() - begin

    least = min(took() for _ in range(5))
    with mode:
        watched = min(took() for _ in range(5))
    return max(0, watched - least) // count


_SDPA_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _seen(mask: torch.Tensor | None, causal: bool, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """True where a query sees a key, as SDPA takes its arguments; None where all do."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask > float("-inf")
    if causal:
        return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    return None


def _scaled(scores: torch.Tensor, scale: float, bias: torch.Tensor | None, seen: torch.Tensor | None) -> torch.Tensor:
    scores = scores * scale
    if bias is not None:
        return scores + bias
    return scores if seen is None else scores.masked_fill(~seen, float("-inf"))
