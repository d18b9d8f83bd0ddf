"""Compute block-sparse attention: a pattern chooses the keys of each block of queries.

In some patterns, generation with a cache keeps other keys than one pass over the whole sequence.
The random tiles of `random` and `bigbird`, and `sparsity` in `window`, `local_global`, `bigbird` and
`block`, depend on the length of the cache. `top_k` and `threshold` choose for a block of queries,
and generation has one query per block.
"""

import contextlib
from collections.abc import Iterator

from torch import Tensor

from nanolib.models.attention import block_sparse, flex
from nanolib.models.attention.block_mask import (
    BlockMask,
    mask_shape,
    static_mask,
    uses_index,
    with_window,
)
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import Options
from nanolib.models.attention.reference import Work
from nanolib.torch_internals import FakeTensorMode, detect_fake_mode, dispatch_modes

_WATCHED: list[list[Work]] = []


@contextlib.contextmanager
def watched_work() -> Iterator[list[Work]]:
    """Yield a list that collects the `Work` of each call of `attend` within the context."""
    found = []
    _WATCHED.append(found)
    try:
        yield found
    finally:
        _WATCHED.pop()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    options: Options,
    scores: Tensor | None = None,
) -> Tensor:
    """Compute sparse attention. See `nanolib.models.attention.attend`."""
    given = {"causal": causal, "options": options, "scores": scores}
    by_flex = flex.computes_sparse(
        q.device.type, q.dtype, q.shape[-1], q.shape[2], options.block_size
    )
    by_flex = by_flex and not _is_counted()
    mask = None if by_flex and not _WATCHED else choose_mask(q, k, **given)
    for found in _WATCHED:
        found.append(mask.work)
    if by_flex:
        return flex.attend(q, k, v, **given)
    return block_sparse.attend(q, k, v, mask)


def _is_counted() -> bool:
    """Return whether an active dispatch mode may count operations, which FlexAttention hides."""
    return detect_fake_mode() is None and any(
        not isinstance(mode, FakeTensorMode) for mode in dispatch_modes()
    )


def choose_mask(
    q: Tensor, k: Tensor, *, causal: bool, options: Options, scores: Tensor | None = None
) -> BlockMask:
    """Choose the keys that each block of queries sees.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        causal: Whether a query sees only keys at or before its own position.
        options: Options of the pattern.
        scores: Learned score per token, shape [batch, kv_len], for `dca`.

    Returns:
        Block mask. nanolib caches the mask if the pattern ignores the values of q and k.
    """
    if options.pattern in CHOOSERS:
        return CHOOSERS[options.pattern](q, k, causal, options, scores).blocks()
    return static_mask(options, *mask_shape(options, q, k, causal))


def forget_masks() -> None:
    """Delete all cached masks."""
    with_window.cache_clear()
    static_mask.cache_clear()
    uses_index.cache_clear()
    flex.drawn_mask.cache_clear()
