"""Compute attention over subsets of the keys, and merge the results by their log-sum-exp.

Without causality, queries that share a key head become rows of one matrix product. With causality,
nanolib repeats the keys instead.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_SCORE_BYTES = 2**25  # The scores of one slice of queries take at most 32 MiB.
_LOWEST = -math.inf


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
    out, lse = _kernel(folded, k, v, causal)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def wide_type(x: Tensor) -> torch.dtype:
    """Return the dtype to merge partial results of `x`: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def fold_groups(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Give queries and keys the same number of heads.

    If `causal` is true, the function repeats the keys, because a causal mask needs separate heads.
    Otherwise, queries that share a key head become rows of one head. The caller must reshape the
    results to the shape of `q`.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    if group == 1:
        return q, k, v
    if causal:
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q.reshape(batch, kv_heads, group * q_len, head_dim), k, v


def _kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp for equal numbers of query and key heads."""
    if q.device.type == "cpu":  # The bfloat16 kernel would round attention weights to 3 digits.
        q, k, v = (x.to(wide_type(x)) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    elif q.device.type == "cuda" and q.dtype.itemsize == 2:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        out, lse = plain(q, k, v, causal)
    return out.to(wide_type(q)), lse.to(wide_type(q))


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute output and log-sum-exp by two matrix products, if no fused kernel applies."""
    k, v = (x.to(wide_type(q)) for x in (k, v))
    parts = []
    for rows in few_rows(q, k):
        scores = masked_scores(q, k, causal, rows)
        lse = torch.logsumexp(scores, dim=-1)
        parts.append((torch.exp(scores - finite(lse)[..., None]) @ v, lse))
    if len(parts) == 1:  # A single part, as in decoding, needs no copy.
        return parts[0]
    out, lse = zip(*parts, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


def few_rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Split the queries into slices whose scores use at most 32 MiB, if possible."""
    row = max(1, q.shape[0] * q.shape[1] * k.shape[2]) * wide_type(q).itemsize
    step = max(1, _SCORE_BYTES // row)
    for start in range(0, q.shape[2], step):
        yield slice(start, min(start + step, q.shape[2]))


def masked_scores(q: Tensor, k: Tensor, causal: bool, rows: slice) -> Tensor:
    """Compute q kᵀ / √head_dim for some queries, with −inf for keys that a query does not see."""
    wide = wide_type(q)
    scores = q[:, :, rows].to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5
    if not causal:
        return scores
    queries = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    return scores.masked_fill(queries < torch.arange(k.shape[2], device=q.device), _LOWEST)


def finite(lse: Tensor) -> Tensor:
    """Replace −inf by zero, because −inf minus −inf is NaN."""
    return torch.where(lse == _LOWEST, 0.0, lse)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge `other` and `other_lse` into `out` and `lse`, in place."""
    top = finite(torch.maximum(lse, other_lse))
    weight = torch.exp(other_lse - top)
    total = torch.exp(lse - top) + weight
    out.lerp_(other, (weight / nonzero(total))[..., None])
    lse.copy_(torch.log(total).add_(top))
    return out, lse


def nonzero(total: Tensor) -> Tensor:
    """Replace a zero sum of weights by one, to avoid a division of 0 by 0."""
    return torch.where(total == 0, 1.0, total)
