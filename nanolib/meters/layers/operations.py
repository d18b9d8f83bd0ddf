"""One pass of a model, operation by operation, and what its attention looks like.

Every torch function that the model calls passes by here and is called as it stands, so the output is the same to the last bit.
Where the model calls the fused attention kernel, the weights of a sample of its queries are computed beside it, untimed, and looked
at. Where it computes attention in steps itself (transformers' `eager` attention), they are known by what they do: a product whose
softmax is multiplied by something.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from nanolib.meters.time.stopwatch import CpuStopwatch, Stopwatch

FUSED = "attention_fused"
_QUERIES = 64  # so many of a call are looked at, evenly spaced
ATTENTION_STATISTICS = ("attention_entropy", "attention_max_weight", "attention_sparsity")

# The end of a module's path, as a pattern of whole names → what it does. Of several the first; what none knows keeps its own name.
_BY_PATH = tuple(
    (re.compile(rf"(?:^|\.)(?:{path})$"), role)
    for path, role in (
        (
            r"o_proj|(?:attn|(?:cross)?attention)\.c_proj|(?:cross)?attention\.output\.dense|SelfAttention\.o|EncDecAttention\.o",
            "out_proj",
        ),
        (r"query|SelfAttention\.q|EncDecAttention\.q", "q_proj"),
        (r"key|SelfAttention\.k|EncDecAttention\.k", "k_proj"),
        (r"value|SelfAttention\.v|EncDecAttention\.v", "v_proj"),
        (r"c_attn|qkv_proj|query_key_value", "qkv_proj"),
        (r"gate_proj|wi_0", "gate"),
        (r"up_proj|mlp\.c_fc|intermediate\.dense|wi_1|wi|mlp\.fc1", "up"),
        (r"down_proj|mlp\.c_proj|output\.dense|wo|mlp\.fc2", "down"),
        (r"lm_head", "head"),
        (r"embed_tokens|wte|wpe|shared|\w+_embeddings|relative_attention_bias", "embedding"),
        (r"act_fn|intermediate_act_fn|act", "activation"),
    )
)
_BY_FUNCTION = {
    "silu": "activation",
    "gelu": "activation",
    "add": "residual",
    "__setitem__": "cache",
}


def role_of(name: str, module: torch.nn.Module) -> str:
    """What a module does, in a word shared by models of any source: `q_proj`, `gate`, `norm`, ...; empty for a container."""
    kind = type(module).__name__.lower()
    if "norm" in kind:
        return "norm"
    if "rotary" in kind:
        return "rope"
    if any(module.children()):
        return ""
    return next((role for path, role in _BY_PATH if path.search(name)), name.rsplit(".", 1)[-1])


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
        watch: The clock, which stands still while attention is looked at.
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
        self._scores, self._weights, self._soft = _Chain(), _Chain(), None
        self.marks: list[OperationMark] = []
        self.statistics: list[tuple[int, str, torch.Tensor]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
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
        fused = func is scaled_dot_product_attention
        operation = role or (
            "activation" if in_mlp and name == "mul" else _BY_FUNCTION.get(name, "other")
        )
        watch.resume()
        begin = watch.mark()
        out = func(*args, **kwargs)
        end = watch.mark()
        watch.pause()
        self.marks.append(OperationMark(layer, FUSED if fused else operation, begin, end))
        if fused:
            self._look_at_queries(layer, args, kwargs)
        elif name == "__setitem__" and self._scores.holds(
            list(args[:1])
        ):  # a mask that is written into them
            self._scores.grow(args[0], len(self.marks) - 1)
        elif isinstance(out, torch.Tensor) and not isinstance(out, torch.nn.Parameter):
            self._follow(layer, name, [*args, *kwargs.values()], out)
        watch.resume()
        return out

    def _follow(self, layer: int, name: str, given: list[Any], out: torch.Tensor) -> None:
        """Recognise the steps of attention among what a model calls: qk · … · softmax · … · av; the watch stands still."""
        at = len(self.marks) - 1
        if name in _PRODUCTS and out.dim() >= 3:
            if self._weights.holds(given):
                self._recognised(layer, at)
            else:
                self._scores = _Chain(out, at)
        elif name == "softmax" and self._scores.holds(given):
            self._weights = _Chain(out, at)
            self._soft = (
                next(x for x in given if self._scores.holds([x])),
                out,
                list(self._scores.marks),
            )
        elif self._scores.holds(given):
            self._scores.grow(out, at)
        elif self._weights.holds(given):  # a dropout, another type
            self._weights.grow(out, at)

    def _recognised(self, layer: int, at: int) -> None:
        """A softmax of a product has been multiplied by something: name the steps and look at the weights.

        What is masked has scores that no sum of products has: minus infinity, or what stands for it.
        """
        scores, weights, (product, *between) = self._soft
        soft = self._weights.marks[0]
        for marks, step in (
            ([product], "qk"),
            (between, "scale_mask"),
            ([soft], "softmax"),
            ([at], "av"),
        ):
            self._name(marks, step)
        with torch.no_grad():
            self._look(layer, weights.detach(), scores.detach() > _MASKED)
        self._scores, self._weights, self._soft = _Chain(), _Chain(), None

    def _name(self, marks: list[int], operation: str) -> None:
        for at in marks:
            self.marks[at] = replace(self.marks[at], operation=operation)

    def _look_at_queries(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at the weights that a sample of the fused kernel's queries has; the watch stands still."""
        with torch.no_grad():
            inputs = dict(zip(_SDPA_ARGUMENTS, args, strict=False)) | kwargs
            q, k = (inputs[name].detach() for name in ("query", "key"))
            if inputs.get("enable_gqa"):
                k = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
            sample = torch.arange(0, q.shape[-2], -(-q.shape[-2] // _QUERIES), device=q.device)
            mask = inputs.get("attn_mask")
            if mask is not None:
                mask = mask.expand(*mask.shape[:-2], q.shape[-2], k.shape[-2])[..., sample, :]
            elif inputs.get("is_causal"):
                mask = torch.arange(k.shape[-2], device=q.device) <= sample[:, None]
            seen = mask if mask is None or mask.dtype == torch.bool else mask > _MASKED
            scores = q[..., sample, :] @ k.mT * (inputs.get("scale") or q.shape[-1] ** -0.5)
            if mask is not None:
                scores = (
                    scores.masked_fill(~mask, float("-inf"))
                    if mask.dtype == torch.bool
                    else scores + mask
                )
            self._look(layer, torch.softmax(scores, dim=-1), seen)

    def _look(self, layer: int, weights: torch.Tensor, seen: torch.Tensor | None) -> None:
        """Of the pairs that are not masked: mean entropy of a query's weights (nats), mean largest one, share near zero."""
        p = weights.float()
        p = p.nan_to_num() if seen is None else p.nan_to_num().masked_fill(~seen, 0.0)
        entropy = torch.special.entr(p).sum(dim=-1).mean()
        small = p < self._near_zero
        near = (
            small.float().mean() if seen is None else (small & seen).sum() / seen.expand_as(p).sum()
        )
        values = (entropy, p.amax(dim=-1).mean(), near)
        self.statistics += [
            (layer, name, value) for name, value in zip(ATTENTION_STATISTICS, values, strict=True)
        ]


_PRODUCTS = ("matmul", "__matmul__", "bmm", "baddbmm", "einsum")


_MASKED = -1e4  # scores below this stand for minus infinity, in 16 bits too


class _Chain:
    """A tensor and what was made of it, element by element.

    Attributes:
        marks: Which operations made it.
    """

    def __init__(self, out: torch.Tensor | None = None, mark: int = -1) -> None:
        self._made = (
            {} if out is None else {id(out): out}
        )  # held, so that no other tensor gets its id
        self.marks = [] if out is None else [mark]

    def holds(self, given: list[Any]) -> bool:
        """Whether one of these is of it."""
        return any(id(x) in self._made for x in given)

    def grow(self, out: torch.Tensor, mark: int) -> None:
        """What was made of it."""
        self._made[id(out)] = out
        self.marks.append(mark)


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


_SDPA_ARGUMENTS = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)
