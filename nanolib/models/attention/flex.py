"""Compute sparse attention with torch's compiled FlexAttention."""

import functools
import math
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._higher_order_ops.flex_attention import flex_attention as operation
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import flex_attention

from nanolib.measurement import Unsupported
from nanolib.models.attention.block_mask import (
    mask_shape,
    static_mask,
    with_window,
)
from nanolib.models.attention.dense import flash_attn_version, missing_flash_attn
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import MaskMod, placed, static_mask_mod
from nanolib.models.attention.patterns import Options as SparseOptions
from nanolib.models.attention.reference import tile_count
from nanolib.models.optimize import with_own_code
from nanolib.torch_internals import detect_fake_mode

_KERNEL_TILE = 128  # The side of a GPU kernel's tile must be a multiple of 128.
_LEAST_HEAD_DIM = 16


class Options(SparseOptions):
    """Options of `flex`: the options of `sparse`, and a backend.

    Attributes:
        backend: Kernel of FlexAttention: `triton`, `flash` (flash-attn 4), or `auto` to let torch
            choose.
    """

    backend: Literal["auto", "triton", "flash"] = "auto"


def kernel_tile(device: str, block_size: int) -> int:
    """Return the side of the tiles that the kernel can skip, a multiple of `block_size`."""
    is_gpu = torch.device(device).type == "cuda"
    return math.lcm(block_size, _KERNEL_TILE) if is_gpu else block_size


def computes_sparse(
    device: str, dtype: torch.dtype, head_dim: int, q_len: int, block_size: int
) -> bool:
    """Return whether nanolib computes the attention `sparse` with FlexAttention.

    On CUDA, a loop over blocks would launch thousands of kernels, so nanolib uses FlexAttention.
    nanolib does not decode with FlexAttention, which would compile again for each number of keys.
    """
    has_kernel = dtype != torch.float64 and head_dim >= _LEAST_HEAD_DIM
    return torch.device(device).type == "cuda" and q_len > block_size and has_kernel


def unsupported(device: str, backward: bool, backend: str = "auto") -> str:
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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    options: SparseOptions,
    scores: Tensor | None = None,
) -> Tensor:
    """Compute sparse attention with FlexAttention. See `attention.attend`.

    On tensors without data, nanolib calls the operation of FlexAttention without compiling it.

    Raises:
        Unsupported: The device has no kernel for the backend, or no backward pass.
    """
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    backend = getattr(options, "backend", "auto")  # The options of `sparse` have no backend.
    if reason := unsupported(q.device.type, graph, backend):
        raise Unsupported(reason)
    mask = mask_of(q, k, causal=causal, options=options, scores=scores)
    if detect_fake_mode():
        scale = q.shape[-1] ** -0.5
        return operation(q, k, v, lambda score, *_: score, mask.as_tuple(), scale, {}, (), ())[0]
    if q.device.type == "cpu":  # On CPU, FlexAttention refuses inputs that require grad.
        q, k, v = (x.detach() for x in (q, k, v))
    kernel = compiled(q.shape, k.shape, q.dtype, options)
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
def compiled(*of: Any) -> Any:
    """Compile FlexAttention for one shape, dtype and pattern.

    Without `fullgraph`, dynamo silently falls back to eager mode for code that it cannot compile.
    """
    return torch.compile(with_own_code(flex_attention), dynamic=False, fullgraph=True)


def mask_of(
    q: Tensor, k: Tensor, *, causal: bool, options: SparseOptions, scores: Tensor | None = None
) -> FlexMask:
    """Create FlexAttention's mask. The arguments are those of `sparse.choose_mask`."""
    if options.pattern in CHOOSERS:
        choice = CHOOSERS[options.pattern](q, k, causal, options, scores)
        tile = kernel_tile(q.device.type, options.block_size)
        lengths, mask_mod = (q.shape[2], k.shape[2]), choice.mask_mod(choice.chosen)
        return _list_tiles(*choice.tiles(tile), tile, mask_mod, lengths)
    shape = mask_shape(options, q, k, causal)
    return drawn_mask(options, *shape, q.device, detect_fake_mode())


@functools.lru_cache(maxsize=16)
def drawn_mask(
    options: SparseOptions,
    q_len: int,
    kv_len: int,
    causal: bool,
    heads: int,
    device: torch.device,
    planning: object,
) -> FlexMask:
    """Create the mask of a pattern that ignores the values of q and k.

    Args:
        options: Options of the pattern.
        q_len: Number of queries.
        kv_len: Number of keys.
        causal: Whether a query sees only keys at or before its own position.
        heads: Number of query heads.
        device: Device of the inputs.
        planning: Current `FakeTensorMode`, or None. Each mode needs its own tensors.
    """
    tile = kernel_tile(device.type, options.block_size)
    plans = static_mask(options, q_len, kv_len, causal, heads, tile).plans
    columns = tile_count(kv_len, tile)
    kept = np.empty((len(plans), tile_count(q_len, tile), columns))  # Kept pairs of each tile.
    for head, plan in enumerate(plans):
        for row, block in enumerate(plan):
            seen = np.full(block.keys, block.rows[1] - block.rows[0])
            seen[block.hidden_from :] -= block.hidden.sum(axis=0)
            kept[head, row] = np.bincount(block.positions // tile, seen, columns)
    made = with_window(options, q_len, kv_len, causal)
    mask_mod = static_mask_mod(made, q_len, kv_len, causal, device)
    tiles = (placed(x[None], device) for x in (kept > 0, kept == tile * tile))
    return _list_tiles(*tiles, tile, mask_mod, (q_len, kv_len))


def _list_tiles(
    some: Tensor, whole: Tensor, tile: int, mask_mod: MaskMod, lengths: tuple[int, int]
) -> FlexMask:
    """Create a mask from two tables.

    `some` marks tiles with at least one kept pair, and `whole` marks tiles that keep all pairs.
    """
    lists = []
    for tiles in (some & ~whole, whole):
        order = tiles.int().argsort(dim=-1, descending=True, stable=True)
        lists += [tiles.sum(dim=-1, dtype=torch.int32), order.int()]
    return FlexMask.from_kv_blocks(*lists, tile, mask_mod, lengths)
