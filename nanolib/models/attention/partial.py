"""Attention over a part of the keys, with the log-sum-exp by which parts are merged; float32 where parts meet.

Grouped heads are folded, not copied: the queries that share a key head become rows of one product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

# Keys of a type narrower than float32 are widened in pieces of about this many bytes, so that the wide copy stays in cache.
_PIECE_BYTES = 2**21
_FEW_QUERIES = 64  # with more of them, merging pieces costs more than the copy
_LOWEST = -math.inf


def partial_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the keys given, and what weighs it against attention over other keys.

    Args:
        q: Shape [batch, heads, q_len, head_dim].
        k: Shape [batch, kv_heads, kv_len, head_dim]; kv_heads divides heads; kv_len may be 0.
        v: Shape as `k`.
        causal: Whether query i sees keys up to i alone; q_len and kv_len are equal then.
        mask: True where a query may see a key, shape [q_len, kv_len]; instead of `causal`.
        scale: Factor on the scores; None means head_dim ** -0.5.

    Returns:
        Output, shape of `q`, and log-sum-exp of the scores, [batch, heads, q_len]; both float32 (float64 for such input).
        A query that sees no key has output 0 and log-sum-exp −inf.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = wide_type(q)
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], _LOWEST, dtype=wide)
    folded, k, v = fold_groups(q, k, v, causal)
    if mask is not None:
        mask = mask.repeat(folded.shape[2] // q.shape[2], 1)
    out, lse = _in_pieces(folded, k, v, causal, mask, scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def wide_type(x: torch.Tensor) -> torch.dtype:
    """The type in which parts are merged."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def fold_groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys with as many heads each; what is shaped like the folded queries can be reshaped to that of `q`.

    The queries that share a key head become rows of one head. A causal triangle cannot be folded: there keys are repeated.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    if group == 1:
        return q, k, v
    if causal:
        return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q.reshape(batch, kv_heads, group * q_len, head_dim), k, v


def _in_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_kernel`; in float32 where no kernel takes a mask, and on a CPU, where bf16 kernels round the weights to 3 digits."""
    if q.dtype.itemsize >= 4 or (q.device.type != "cpu" and mask is None):
        return _kernel(q, k, v, causal, mask, scale)
    kv_len, q = k.shape[2], q.float()
    whole = causal or q.shape[2] > _FEW_QUERIES  # a piece of a triangle is none
    piece = kv_len if whole else max(1, _PIECE_BYTES // (4 * k[:, :, :1].numel()))
    found = None
    for start in range(0, kv_len, piece):
        part = slice(start, start + piece)
        seen = None if mask is None else mask[:, part]
        out, lse = _kernel(q, k[:, :, part].float(), v[:, :, part].float(), causal, seen, scale)
        found = (out, lse) if found is None else merge(*found, out, lse)
    return found


def _kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp in the wide type; as many heads of keys as of queries."""
    if q.device.type == "cpu":
        bias = (
            None
            if mask is None
            else torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, _LOWEST)
        )
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    elif q.device.type == "cuda" and q.dtype.itemsize == 2 and mask is None:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale
        )[:2]
    else:
        out, lse = plain(q, k, v, causal, mask, scale)
    out, lse = out.to(wide_type(q)), lse.to(wide_type(q))
    if mask is None:
        return out, lse
    seen = mask.any(
        dim=-1
    )  # of rows without a key, kernels make NaN, 0 or the mean of v, and +inf or -inf
    return torch.where(seen[:, None], out, 0.0), torch.where(seen, lse, _LOWEST)


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from two products, some queries at a time: for devices without a kernel that tells its log-sum-exp."""
    k, v = (x.to(wide_type(q)) for x in (k, v))  # once, and not for each part
    parts = []
    for rows in few_rows(q, k):
        scores = masked_scores(q, k, causal, mask, scale, rows)
        lse = torch.logsumexp(scores, dim=-1)
        parts.append((torch.exp(scores - finite(lse)[..., None]) @ v, lse))
    if len(parts) == 1:  # as for every decoded token
        return parts[0]
    out, lse = zip(*parts, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


_SCORE_BYTES = (
    2**25
)  # of one matrix of scores: what is done with queries and keys of any length stays as small as this


def few_rows(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    """The queries in parts whose scores stay small."""
    row = max(1, q.shape[0] * q.shape[1] * k.shape[2]) * wide_type(q).itemsize
    step = max(1, _SCORE_BYTES // row)
    for start in range(0, max(1, q.shape[2]), step):
        yield slice(start, min(start + step, q.shape[2]))


def masked_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
    rows: slice,
) -> torch.Tensor:
    """Scale · q kᵀ with −inf where nothing is seen, of some queries."""
    wide = wide_type(q)
    scores = q[:, :, rows].to(wide) @ k.to(wide).mT * scale
    if causal:
        queries = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        seen = queries >= torch.arange(k.shape[2], device=q.device)
    else:
        seen = None if mask is None else mask[rows]
    return scores if seen is None else scores.masked_fill(~seen, _LOWEST)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Zero where it is −inf, so that differences from it are no NaN."""
    return torch.where(lse == _LOWEST, 0.0, lse)


def merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of both parts, written over the first; arguments as `partial_attention` gives them."""
    top = finite(torch.maximum(lse, other_lse))
    weight = torch.exp(other_lse - top)
    total = torch.exp(lse - top) + weight
    out.lerp_(other, (weight / nonzero(total))[..., None])
    lse.copy_(torch.log(total).add_(top))
    return out, lse


def nonzero(total: torch.Tensor) -> torch.Tensor:
    """One where a sum of weights is zero: what it divides is zero as well."""
    return torch.where(total == 0, 1.0, total)
