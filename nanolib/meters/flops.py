"""Count the FLOPs of a call, and the bytes that it reads. A multiply-add counts as two FLOPs."""

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.utils.flop_counter import flop_registry

from nanolib.config import NanoConfig
from nanolib.meters.memory import READS_DEVICE, storage_key, tensors_in
from nanolib.torch_internals import FakeTensor, TorchDispatchMode

BACKWARD_FACTOR = 2.0  # A backward pass has two products for each product of the forward pass.
# Fused attention recomputes the scores in the backward pass: five products instead of four.
RECOMPUTING_BACKWARD_FACTOR = 2.5
_MASKED = -1e4  # This bias or less masks a pair. All 16-bit dtypes can represent the bias.
_ROWS = 1024  # Number of queries for which nanolib evaluates a mask at once.
_LOOK_UPS = {
    torch.ops.aten.embedding,
    torch.ops.aten.index,
    torch.ops.aten.index_select,
    torch.ops.aten.gather,
}


def _grouped_product_flops(a: Tensor, b: Tensor, *rest, **named) -> int:
    # Each row of `a` is multiplied by the matrix of one group. Two stacks are multiplied in pairs.
    stacks = len(a) if a.dim() == b.dim() == 3 else 1
    return 2 * stacks * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _convolution_backward_flops(grad: Tensor, x: Tensor, weight: Tensor, *rest, **named) -> int:
    # The gradients of the input and of the weight each need as many products as the forward pass.
    *_, is_transposed, _padding, _groups, (of_input, of_weight, _) = rest
    positions = (x if is_transposed else grad)[:, 0].numel()
    return 2 * positions * weight.numel() * (of_input + of_weight)


# Formulas of operations that torch's counter does not count, or counts without their groups.
_FORMULAS = {
    "aten::convolution_backward": _convolution_backward_flops,
    "aten::_grouped_mm": _grouped_product_flops,
    "transformers::grouped_mm_fallback": _grouped_product_flops,
    "aten::_int_mm": _grouped_product_flops,
}
# Words in the names of operations that multiply matrices.
_PRODUCTS = {"addmv", "vdot", "linear", "trilinear", "rnn", "lstm", "gru", "attention", "conv"}
_PRODUCTS |= {"convolution", "cdist", "fft", "mv", "dot"}
# In these namespaces, the name of an operation shows whether the operation multiplies matrices.
_KNOWN_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")


@dataclass
class FlopCount:
    """FLOPs of one call.

    Attributes:
        kept: FLOPs of the model. Attention counts the query-key pairs that its mask keeps. The
            backward pass of attention counts as two forward passes, even if the kernel recomputes
            the scores.
        full: Count of `torch.utils.flop_counter`, with additional formulas. Attention counts all
            pairs, masked or not.
        uncounted: Names of operations that count as 0 FLOPs, because they have no formula.
        unread_masks: Number of attention calls whose mask is a fake tensor, which has no data. In
            these calls, all pairs count.
        has_split_attention: Whether attention ran as products, so that masked pairs count too.
    """

    kept: int = 0
    full: int = 0
    uncounted: set[str] = field(default_factory=set)
    unread_masks: int = 0
    has_split_attention: bool = False

    @property
    def message(self) -> str:
        """Message of a row whose count is too small or too large, or an empty string."""
        names, messages = ", ".join(sorted(self.uncounted)), []
        if names:
            messages.append(f"incomplete: there is no formula for {names}")
        if self.has_split_attention:
            messages.append("masked pairs count too: attention ran as matrix products")
        return "; ".join(messages)


def count_flops(fn: Callable[[], object]) -> FlopCount:
    """Count the FLOPs of one call, outside any timing.

    Matrix products, convolutions and attention count, but element-wise operations do not. In
    attention without a fused kernel, such as the backend `math`, all pairs count. Kernels that are
    not operations of torch, such as Triton kernels that you launch yourself, do not count.

    Args:
        fn: Function to call.
    """
    count, has_fast_path = FlopCount(), torch.backends.mha.get_fastpath_enabled()
    stance = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # torch cannot compile while this counter runs.
        stance = torch.compiler.set_stance("force_eager")
    # The fast path of torch's transformer layers is one operation without a formula.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with stance, _Counter(count):
            fn()
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
    return count


class _Counter(TorchDispatchMode):
    """Add up the FLOPs of the operations that run."""

    supports_higher_order_operators = True

    def __init__(self, count: FlopCount):
        super().__init__()
        self._count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation, or the operations that it consists of, and count FLOPs."""
        kwargs, name = kwargs or {}, func.name().partition(".")[0]
        if not hasattr(func, "overloadpacket"):  # FlexAttention is a higher-order operation.
            out = func(*args, **kwargs)
            if name in ("flex_attention", "flex_attention_backward"):
                self._add_flex_attention(name, args)
            else:
                self._count.uncounted.add(name)
            return out
        # torch uses the safe softmax only if it splits attention into products. Models that compute
        # attention themselves use the other softmax, over scores with heads, queries and keys.
        scores = name == "aten::_softmax" and args[0].dim() == 4 and args[1] in (-1, 3)
        if scores or name == "aten::_safe_softmax":
            self._count.has_split_attention = True
        formula = _FORMULAS.get(name, flop_registry.get(func.overloadpacket))
        is_attention = "_scaled_dot_product" in name
        if not (is_attention or formula or func is READS_DEVICE):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if is_attention:
            names = (argument.name for argument in func._schema.arguments)
            self._add_sdpa(name, dict(zip(names, args, strict=False)) | kwargs)
        elif formula:
            flops = formula(*args, **kwargs, out_val=out)
            self._count.kept += flops
            self._count.full += flops
        elif _is_product(name):
            self._count.uncounted.add(name)
        return out

    def _add_sdpa(self, name: str, given: dict[str, Any]):
        q, k, v = (given[name] for name in ("query", "key", "value"))
        q_len, kv_len = q.shape[-2], k.shape[-2]
        mask = given.get("attn_mask", given.get("attn_bias"))
        if given.get("is_causal"):  # torch aligns the first query with the first key.
            kept, total = sum(min(row + 1, kv_len) for row in range(q_len)), q_len * kv_len
        elif mask is None:
            kept, total = 1, 1
        else:
            kept, total = self._sum_of(kept_pairs(mask)), mask.numel()
        self._add_attention(name, q, k, v, kept, total)

    def _add_flex_attention(self, name: str, args: tuple[Any, ...]):
        q, k, v = args[:3]
        mask = next(x for x in args[3:] if isinstance(x, tuple) and x and callable(x[-1]))
        batch, heads = mask[2].shape[:2]
        q_len, kv_len = q.shape[-2], k.shape[-2]
        kept = 0
        for start in range(0, q_len, _ROWS):
            rows = min(_ROWS, q_len - start)
            shifted = lambda b, h, i, j, start=start: mask[-1](b, h, i + start, j)  # noqa: E731
            kept += self._sum_of(create_mask(shifted, batch, heads, rows, kv_len, q.device))
        self._add_attention(name, q, k, v, kept, batch * heads * q_len * kv_len)

    def _sum_of(self, is_kept: Tensor) -> int:
        """Count the kept pairs, or all pairs if the mask has no data."""
        if isinstance(is_kept, FakeTensor) or is_kept.is_meta:
            self._count.unread_masks += 1
            return is_kept.numel()
        return int(is_kept.sum())

    def _add_attention(self, name: str, q: Tensor, k: Tensor, v: Tensor, kept: int, total: int):
        """Add the FLOPs of attention's two products. The mask keeps `kept` of `total` pairs."""
        scores = 2 * q.numel() * k.shape[-2]
        flops = scores + scores // q.shape[-1] * v.shape[-1]
        is_backward = name.endswith("_backward")
        if is_backward:
            flops = round(BACKWARD_FACTOR * flops)
        self._count.kept += flops * kept // total
        recomputes = is_backward and "for_cpu" not in name
        self._count.full += flops + (scores if recomputes else 0)


def kept_pairs(mask: Tensor) -> Tensor:
    """Return the query-key pairs that a boolean mask or an added bias keeps, as booleans."""
    return mask if mask.dtype == torch.bool else mask > _MASKED


def _is_product(name: str) -> bool:
    """Return whether an operation without a formula may multiply matrices.

    nanolib assumes that each custom operation may multiply matrices.
    """
    namespace, _, operation = name.partition("::")
    if namespace not in _KNOWN_NAMESPACES:
        return True
    words = operation.split("_")
    return any(word in _PRODUCTS or word.endswith("mm") for word in words)


class BytesRead(TorchDispatchMode):
    """Count the bytes that operations read from given tensors. Each element counts once.

    If operations read different parts of a tensor, the largest part counts. In a lookup table, at
    most one row per lookup counts. In a stack of experts, at most one expert per token counts.
    Elements that the call wrote before do not count.

    Args:
        tensors: Tensors that exist before the call, such as weights and a cache.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__()
        self._read = {storage_key(x): 0 for x in tensors}  # key of a storage → bytes read from it
        self._written = Counter()  # key of a storage → elements that operations wrote

    @property
    def bytes(self) -> int:
        """Number of bytes that operations have read."""
        return sum(self._read.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operation and count the bytes that it reads."""
        out = func(*args, **kwargs or {})
        if func is READS_DEVICE:
            return out
        schema = getattr(func, "_schema", None)  # FlexAttention has no schema.
        made = {storage_key(x) for x in tensors_in(out)}
        for x in tensors_in((args, kwargs)):
            key = storage_key(x)
            if key not in self._read:
                continue
            if key not in made:
                taken = (_taken(func, args, x, out) - self._written[key]) * x.element_size()
                self._read[key] = max(self._read[key], taken)
            elif schema and schema.is_mutable:  # An operation that makes a view reads nothing.
                self._written[key] += _elements(x)
        return out


def _taken(func, args: tuple[Any, ...], x: Tensor, out) -> int:
    """Return how many elements of a tensor the operation reads."""
    operation = getattr(func, "overloadpacket", None)
    if operation in _LOOK_UPS and x is args[0]:
        return min(_elements(x), out.numel())
    if operation is torch.ops.aten._grouped_mm and x.dim() == 3 and args[0].dim() == 2:
        return _elements(x[0]) * min(x.shape[0], args[0].shape[0])
    return _elements(x)


def _elements(x: Tensor) -> int:
    """Count the elements of a tensor in memory. An expanded dimension has size 1 in memory."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)


def model_flops(config: NanoConfig, batch: int, length: int, kept: float) -> dict[str, int]:
    """Compute the FLOPs of a model's parts, for sequences or for tokens after a cached prompt.

    Args:
        config: Configuration of the model.
        batch: Number of sequences.
        length: Number of tokens that the model computes per sequence.
        kept: Mean number of query-key pairs per head that attention computes (`Work.kept`).

    Returns:
        FLOPs of each part, summed over all layers, and their `total`. In each layer, `projections`
        has 2·tokens·(2d² + 2d·kv), `attention` has 4·batch·heads·kept·head_dim, and `mlp` has
        2·tokens·(3 with SwiGLU, otherwise 2)·d·d_ff. `head` has 2·tokens·d·vocab.
    """
    d, kv, layers = config.d_model, config.kv_heads * config.head_dim, config.num_layers
    per_pair = 4 * batch * config.num_heads * config.head_dim
    tokens = batch * length
    parts = {
        "projections": layers * 2 * tokens * (2 * d * d + 2 * d * kv),
        "attention": layers * round(per_pair * kept),
        "mlp": layers * 2 * tokens * (3 if config.mlp == "swiglu" else 2) * d * config.mlp_width,
        "head": 2 * tokens * d * config.vocab_size,
    }
    return parts | {"total": sum(parts.values())}
