"""Compute sparse attention with FlexAttention, or with a kernel for CPUs, and create the masks.

In some patterns, generation with a cache keeps other keys than one pass over the whole sequence.
The random tiles of `random` and `bigbird`, and `sparsity` in `window`, `local_global`, `bigbird`
and `block`, depend on the length of the cache. `top_k` and `threshold` choose for a block of
queries, and generation has one query per block.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._higher_order_ops.flex_attention import flex_attention as operation
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import (
    _create_sparse_block_from_block_mask as mask_of_tiles,
)
from torch.nn.attention.flex_attention import flex_attention

from nanolib.measurement import BadInput, Unsupported
from nanolib.models.attention import block_sparse
from nanolib.models.attention.block_mask import (
    BlockMask,
    QueryBlock,
    static_mask,
    uses_index,
)
from nanolib.models.attention.dense import flash_attn_version, missing_flash_attn
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import Options, copy_to_device, static_mask_mod
from nanolib.models.attention.reference import Work, tile_count
from nanolib.models.training import copy_function
from nanolib.torch_internals import FakeTensorMode, detect_fake_mode, dispatch_modes

_WATCHED = []  # The lists of `watched_work`.


class FlexOptions(Options):
    """Options of `flex`: the options of `sparse`, and a backend.

    Attributes:
        backend: Kernel of FlexAttention: `triton`, `flash` (flash-attn 4), or `auto` to let torch
            choose.
    """

    backend: Literal["auto", "triton", "flash"] = "auto"


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
    """Compute sparse attention, always with FlexAttention if `options` is `FlexOptions`.

    See `nanolib.models.attention.attend`.

    Raises:
        Unsupported: FlexAttention has no kernel for the device and backend, or no backward pass.
    """
    given = {"causal": causal, "options": options, "scores": scores}
    by_flex = isinstance(options, FlexOptions) or (
        uses_flex(q.device.type, q.dtype, q.shape[-1], q.shape[2], options.block_size)
        and not _is_counted()
    )
    mask = choose_mask(q, k, **given, by_flex=by_flex)
    for found in _WATCHED:
        found.append((choose_mask(q, k, **given) if by_flex else mask).work)
    if by_flex:
        return _attend_by_flex(q, k, v, mask, options)
    return block_sparse.attend(q, k, v, mask)


def uses_flex(device: str, dtype: torch.dtype, head_dim: int, q_len: int, block_size: int) -> bool:
    """Return whether nanolib computes the attention `sparse` with FlexAttention.

    On CUDA, a loop over blocks would launch thousands of kernels, so nanolib uses FlexAttention.
    nanolib does not decode with FlexAttention, which would compile again for each number of keys.
    """
    has_kernel = dtype != torch.float64 and head_dim >= 16
    return torch.device(device).type == "cuda" and q_len > block_size and has_kernel


def _is_counted() -> bool:
    """Return whether an active dispatch mode may count operations, which FlexAttention hides."""
    return detect_fake_mode() is None and any(
        not isinstance(mode, FakeTensorMode) for mode in dispatch_modes()
    )


def choose_mask(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool,
    options: Options,
    scores: Tensor | None = None,
    by_flex: bool = False,
) -> BlockMask | FlexMask:
    """Choose the keys that each block of queries sees.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        causal: Whether a query sees only keys at or before its own position.
        options: Options of the pattern.
        scores: Learned score per token, shape [batch, kv_len], for `dca`.
        by_flex: Whether to return the mask of FlexAttention instead of the mask of the CPU kernel.

    Returns:
        Block mask. nanolib caches the mask if the pattern ignores the values of q and k.

    Raises:
        BadInput: Sequences share your own `mask_mod`, which uses their index.
    """
    if options.pattern not in CHOOSERS:
        if options.pattern == "own" and len(q) > 1 and uses_index(options, 0):
            raise BadInput(
                f"attention_options.mask_mod: {options.mask_mod} uses b, but all sequences share "
                "one mask; remove b from the mask, or give one sequence"
            )
        shape = q.shape[2], k.shape[2], causal, q.shape[1]
        if by_flex:
            return drawn_mask(options, *shape, q.device, detect_fake_mode())
        return static_mask(options, *shape)
    choice = CHOOSERS[options.pattern](q, k, causal, options, scores)
    if not by_flex:
        return choice.blocks()
    tile, mask_mod = kernel_tile(q.device.type, options.block_size), choice.mask_mod(choice.chosen)
    return mask_of_tiles(choice.tiles(tile), mask_mod, (q.shape[2], k.shape[2]), tile, tile)


def kernel_tile(device: str, block_size: int) -> int:
    """Return the side of the tiles that FlexAttention can skip, a multiple of `block_size`."""
    # The side of a GPU kernel's tile must be a multiple of 128.
    return math.lcm(block_size, 128) if torch.device(device).type == "cuda" else block_size


@functools.lru_cache(maxsize=16)
def drawn_mask(
    options: Options,
    q_len: int,
    kv_len: int,
    causal: bool,
    heads: int,
    device: torch.device,
    planning: object,
) -> FlexMask:
    """Create FlexAttention's mask of a pattern that ignores the values of q and k.

    Args:
        options: Options of the pattern.
        q_len: Number of queries.
        kv_len: Number of keys.
        causal: Whether a query sees only keys at or before its own position.
        heads: Number of query heads.
        device: Device of the inputs.
        planning: Current `FakeTensorMode`, or None. Each mode needs its own tensors.
    """
    size, tile = options.block_size, kernel_tile(device.type, options.block_size)
    mask = static_mask(options, q_len, kv_len, causal, heads)

    def kept_pairs(block: QueryBlock) -> np.ndarray:
        seen = np.full(block.keys, block.rows[1] - block.rows[0])
        seen[block.hidden_from :] -= block.hidden.sum(axis=0)
        return np.bincount(block.positions // size, seen, tile_count(kv_len, size))

    kept = np.array([[kept_pairs(block) for block in plan] for plan in mask.plans])
    for axis in (1, 2):
        kept = np.add.reduceat(kept, range(0, kept.shape[axis], tile // size), axis)
    mask_mod = static_mask_mod(mask.options, q_len, kv_len, causal, device)
    whole = kept == tile * tile
    tiles = (copy_to_device(x[None], device) for x in ((kept > 0) & ~whole, whole))
    return mask_of_tiles(tiles, mask_mod, (q_len, kv_len), tile, tile)


def forget_masks() -> None:
    """Delete all cached masks."""
    for cached in (static_mask, uses_index, drawn_mask):
        cached.cache_clear()


def flex_unsupported(device: str, backward: bool, backend: str) -> str:
    """Return why FlexAttention cannot run on a device, or an empty string."""
    on_cpu = torch.device(device).type == "cpu"
    if backend != "auto" and on_cpu:
        return f"FlexAttention has no backend {backend} on CPU; use backend: auto"
    if backend == "flash" and not flash_attn_version(4):
        return f"FlexAttention's backend flash needs {missing_flash_attn(4)}"
    if backward and on_cpu:
        return (
            "FlexAttention has no backward pass on CPU; use sparse, or measure with backward: false"
        )
    return ""


def _attend_by_flex(q: Tensor, k: Tensor, v: Tensor, mask: FlexMask, options: Options) -> Tensor:
    """Compute sparse attention with FlexAttention.

    On tensors without data, nanolib calls the operation of FlexAttention without compiling it.
    """
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    backend = getattr(options, "backend", "auto")  # The options of `sparse` have no backend.
    if reason := flex_unsupported(q.device.type, graph, backend):
        raise Unsupported(reason)
    if detect_fake_mode():
        scale = q.shape[-1] ** -0.5
        return operation(q, k, v, lambda score, *_: score, mask.as_tuple(), scale, {}, (), ())[0]
    if q.device.type == "cpu":  # On CPU, FlexAttention refuses inputs that require grad.
        q, k, v = (x.detach() for x in (q, k, v))
    kernel = compile_flex(q.shape, k.shape, q.dtype, options)
    out = kernel(
        q,
        k,
        v,
        block_mask=mask,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=None if backend == "auto" else {"BACKEND": backend.upper()},
    )
    return out.to(q.dtype)


def allow_repeated_backward() -> None:
    """Allow this process to repeat the backward pass of graphs that it compiles from now on."""
    functorch_config.donated_buffer = False


@functools.lru_cache(maxsize=64)
def compile_flex(*of):
    """Compile FlexAttention for one shape, dtype and pattern.

    Without `fullgraph`, dynamo silently falls back to eager mode for code that it cannot compile.
    """
    return torch.compile(copy_function(flex_attention), dynamic=False, fullgraph=True)
