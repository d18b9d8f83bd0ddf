"""torch's FlexAttention, compiled, over the masks of the sparse patterns: the same tiles, another kernel."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Literal

import numpy as np
import torch
import torch._functorch.config
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._higher_order_ops.flex_attention import flex_attention as operation
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import flex_attention

from nanolib.measurement import Unsupported
from nanolib.models.attention import flash_attn
from nanolib.models.attention.block_mask import (
    static_mask,
    static_mask_mod,
    with_window,
    work,
)
from nanolib.models.attention.dynamic import CHOOSERS, Choice
from nanolib.models.attention.patterns import MaskMod, placed, tile_count
from nanolib.models.attention.patterns import Options as SparseOptions
from nanolib.models.own_code import with_own_code

__all__ = ["Options", "attend", "work"]

_KERNEL_TILE = 128  # of queries and keys: torch's kernels for GPUs need multiples of it, backward ones for Hopper too
_LEAST_HEAD_DIM = 16


class Options(SparseOptions):
    """Options of `flex`: those of `sparse`, and who computes.

    Attributes:
        backend: Which of torch's kernels for FlexAttention; `auto` lets torch choose, `flash` is flash-attn 4.
    """

    backend: Literal["auto", "triton", "flash"] = "auto"


def kernel_tile(device: str, block_size: int) -> int:
    """The side of a tile that the kernel skips: `block_size`, on a GPU its least multiple that the kernel can take."""
    is_gpu = torch.device(device).type == "cuda"
    return math.lcm(block_size, _KERNEL_TILE) if is_gpu else block_size


def computes_sparse(
    device: str, dtype: torch.dtype, head_dim: int, q_len: int, block_size: int
) -> bool:
    """Whether `sparse` goes through FlexAttention: on CUDA, where a loop over blocks would be thousands of launches.

    The queries of a single block, as in decoding, need no loop, and FlexAttention would be compiled for each new length of keys.
    """
    has_kernel = dtype != torch.float64 and head_dim >= _LEAST_HEAD_DIM
    return torch.device(device).type == "cuda" and q_len > block_size and has_kernel


def unsupported(device: str, backward: bool, backend: str = "auto") -> str:
    """Why FlexAttention cannot run there; empty when it can. To ask compiles nothing."""
    on_cpu = torch.device(device).type == "cpu"
    if backend != "auto" and on_cpu:
        return f"FlexAttention has no backend {backend} on CPU; use backend: auto"
    if backend == "flash" and not flash_attn.found_version(4):
        return f"FlexAttention's backend flash needs {flash_attn.missing(4)}"
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
    scale: float | None,
    options: SparseOptions,
    scores: Tensor | None = None,
) -> Tensor:
    """Sparse attention by FlexAttention, compiled, or planned by its operation; see `nanolib.models.attention.attend`.

    Raises:
        Unsupported: A backward pass on CPU, which torch refuses.
    """
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    backend = getattr(options, "backend", "auto")  # `sparse` has no such option
    if reason := unsupported(q.device.type, graph, backend):
        raise Unsupported(reason)
    mask = mask_of(q, k, causal=causal, options=options, scores=scores)
    if detect_fake_mode():
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return operation(q, k, v, lambda score, *_: score, mask.as_tuple(), scale, {}, (), ())[0]
    if (
        q.device.type == "cpu"
    ):  # it refuses inputs that ask for a gradient, even where none is taken
        q, k, v = (x.detach() for x in (q, k, v))
    kernel = compiled(q.shape, k.shape, q.dtype, options)
    # else the backward pass may write over what the graph has saved; what is compiled here serves other processes too
    with torch._functorch.config.patch(donated_buffer=False) if graph else contextlib.nullcontext():
        out = kernel(
            q,
            k,
            v,
            block_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
            kernel_options=None if backend == "auto" else {"BACKEND": backend.upper()},
        )
    return out.to(q.dtype)


def allow_repeated_backward() -> None:
    """Let this process call the backward pass of a compiled graph again, as `attend` has compiled it."""
    torch._functorch.config.donated_buffer = False


@functools.lru_cache(maxsize=64)
def compiled(*of: Any) -> Any:
    """FlexAttention through torch.compile, for one shape, dtype and pattern.

    A full graph, since dynamo would else run unfused what it cannot compile, and say nothing.
    """
    return torch.compile(with_own_code(flex_attention), dynamic=False, fullgraph=True)


def mask_of(
    q: Tensor, k: Tensor, *, causal: bool, options: SparseOptions, scores: Tensor | None = None
) -> FlexMask:
    """The mask as FlexAttention takes it; arguments as of `sparse.choose_mask`."""
    if options.pattern in CHOOSERS:
        return chosen_mask(CHOOSERS[options.pattern](q, k, causal, options, scores))
    shape = q.shape[2], k.shape[2], causal, options.masked_heads(q.shape[1])
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
    """Of a pattern that depends on the shape alone, from its plan: no pair outside the pattern's runs is looked at.

    Args:
        options: The pattern, and what it reads.
        q_len: Queries.
        kv_len: Keys.
        causal: Whether the future is masked.
        heads: Heads with a mask of their own.
        device: Where the inputs are.
        planning: The mode in which tensors have no data, if they have none.
    """
    tile = kernel_tile(device.type, options.block_size)
    plans = static_mask(options, q_len, kv_len, causal, heads, tile).plans
    some = np.zeros((len(plans), tile_count(q_len, tile), tile_count(kv_len, tile)), dtype=bool)
    part = np.zeros_like(some)
    for head, plan in enumerate(plans):
        for row, block in enumerate(plan):
            keys = block.positions // tile
            some[head, row, keys] = True
            part[head, row, keys[block.hidden_from :][block.hidden.any(axis=0)]] = True
    part[:, q_len // tile :] = part[:, :, kv_len // tile :] = True  # cut by the sequence's end
    made = with_window(options, q_len, kv_len, causal)
    causal = options.hides_future(causal)
    mask_mod = static_mask_mod(made, q_len, kv_len, causal, heads, device)
    tiles = (placed(x[None], device) for x in (some, some & ~part))
    return _listed(*tiles, tile, mask_mod, (q_len, kv_len))


def chosen_mask(choice: Choice) -> FlexMask:
    """Of a pattern that looks at the input: the tiles are listed where the choice is, and the host waits for nothing."""
    tile = kernel_tile(choice.chosen.device.type, choice.block_size)
    mask_mod = choice.mask_mod(choice.chosen)
    return _listed(*choice.tiles(tile), tile, mask_mod, (choice.q_len, choice.kv_len))


def _listed(
    some: Tensor, whole: Tensor, tile: int, mask_mod: MaskMod, lengths: tuple[int, int]
) -> FlexMask:
    """A mask from which tiles hold a kept pair, and which nothing else; bool [batch, heads, query tiles, key tiles]."""
    part, lists = some & ~whole, []
    for tiles in (part, whole, part.mT.contiguous(), whole.mT.contiguous()):
        order = tiles.int().argsort(dim=-1, descending=True, stable=True)
        lists += [tiles.sum(dim=-1, dtype=torch.int32), order.int()]
    return FlexMask(lengths, *lists, BLOCK_SIZE=(tile, tile), mask_mod=mask_mod)
