"""Compute attention over some of the keys and its gradients, and merge by log-sum-exp.

Without causality, queries that share a key head become rows of one matrix product. With causality,
nanolib repeats the keys instead.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_SCORES = 2**23  # Largest number of scores of one slice of queries. In float32, they use 32 MiB.
_LOWEST = -math.inf
aten = torch.ops.aten


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute attention over some of the keys, and the log-sum-exp that `merge` needs.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim]. kv_heads must divide heads, and kv_len
            may be 0.
        v: Values, with the shape of `k`.
        causal: Whether query i sees only the keys 0 to i. If true, q_len must equal kv_len.

    Returns:
        Output, with the shape of `q`, and log-sum-exp of the scores, shape [batch, heads, q_len].
        Both results have the dtype `wide_type(q)`. A query without any key has output 0 and
        log-sum-exp −inf.
    """
    wide = wide_type(q)
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], _LOWEST, dtype=wide)
    folded, k, v = fold_groups(q, k, v, causal)
    if q.device.type == "cpu":  # The bfloat16 kernel would round attention weights to 3 digits.
        wider = (x.to(wide) for x in (folded, k, v))
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*wider, 0.0, causal)
    elif q.device.type == "cuda" and q.dtype.itemsize == 2:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(folded, k, v, 0.0, causal)
    else:
        out, lse = plain(folded, k, v, causal)
    return out.to(wide).reshape(q.shape), lse.to(wide).reshape(q.shape[:3])


def wide_type(x: Tensor) -> torch.dtype:
    """Return the dtype to merge partial results of `x`: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def fold_groups(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Give queries and keys the same number of heads.

    If `causal` is true, the function repeats the keys, because a causal mask needs separate heads.
    Otherwise, queries that share a key head become rows of one head. The caller must reshape the
    results to the shape of `q`.
    """
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return q, k, v
    if causal:
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q.unflatten(1, (-1, group)).flatten(2, 3), k, v


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp by two matrix products, if no fused kernel applies."""
    k, v = (x.to(wide_type(q)) for x in (k, v))  # Convert keys and values once for all slices.
    parts = [(weights @ v, log_sum) for _, weights, log_sum in _weights(q, k, causal)]
    out, lse = (torch.cat(slices, dim=2) for slices in zip(*parts, strict=True))
    return out, lse


def _weights(
    q: Tensor, k: Tensor, causal: bool, lse: Tensor | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Compute attention weights of a few queries at a time.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys in the wide dtype, shape [batch, heads, kv_len, head_dim].
        causal: Whether query i sees only the keys 0 to i.
        lse: Log-sum-exp of the scores over all keys, or None to use the log-sum-exp over `k`.

    Yields:
        Slice of the queries, their weights, and their log-sum-exp.
    """
    step = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    for start in range(0, q.shape[2], step):
        rows = slice(start, start + step)
        scores = q[:, :, rows].to(k.dtype) @ k.mT * q.shape[-1] ** -0.5
        if causal:
            later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(start + 1)
            scores = scores.masked_fill(later, _LOWEST)
        log_sum = torch.logsumexp(scores, dim=-1) if lse is None else lse[:, :, rows]
        yield rows, torch.exp(scores - finite(log_sum)[..., None]), log_sum


def block_gradients(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the part of the gradients that comes from a block of keys.

    Args:
        grad_out: Gradient of the output, with the shape of `q`.
        q: Queries, shape [batch, heads, q_len, head_dim].
        out: Output over all keys, float32, with the shape of `q`.
        lse: Log-sum-exp over all keys, float32, shape [batch, heads, q_len].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        v: Values, with the shape of `k`.
        causal: Whether query i sees only the keys 0 to i.

    Returns:
        Gradients of q, k and v, float32, or float64 if `q` is float64.
    """
    kv_heads = k.shape[1]
    folded, k, v = fold_groups(q, k, v, causal)
    grad, whole, lse = (x.reshape(folded.shape[: x.dim()]) for x in (grad_out, out, lse))
    given = [x.to(out.dtype) for x in (grad, folded, k, v, whole)]
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        grad_q, *grads = backward(*given, lse, 0.0, causal)
    else:
        grad_q, *grads = plain_gradients(*given, lse, causal)
    if k.shape[1] > kv_heads:  # The gradients of repeated keys add up.
        grads = [x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in grads]
    return grad_q.reshape(q.shape), *grads


def plain_gradients(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `block_gradients` by matrix products, for equal numbers of query and key heads."""
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    for rows, weights, _ in _weights(q, k, causal, lse):
        grad = grad_out[:, :, rows]
        grad_v += weights.mT @ grad
        inner = (grad * out[:, :, rows]).sum(dim=-1, keepdim=True)
        grad_scores = (grad @ v.mT).sub_(inner).mul_(weights).mul_(q.shape[-1] ** -0.5)
        grad_q[:, :, rows] = grad_scores @ k
        grad_k += grad_scores.mT @ q[:, :, rows]
    return grad_q, grad_k, grad_v


def finite(lse: Tensor) -> Tensor:
    """Replace −inf by zero, because −inf minus −inf is NaN."""
    return torch.where(lse == _LOWEST, 0.0, lse)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge `other` and `other_lse` into `out` and `lse`, in place."""
    top = finite(torch.maximum(lse, other_lse))
    weight = torch.exp(other_lse - top)
    total = torch.exp(lse - top) + weight
    # The larger weight is 1. Without any key, the total is 0, and 0 / 0 is NaN.
    out.lerp_(other, (weight / total.clamp(min=1))[..., None])
    lse.copy_(torch.log(total).add_(top))
    return out, lse
