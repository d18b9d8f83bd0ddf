"""torch's FlexAttention, compiled, over the masks of the sparse patterns: the same tiles, another kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from nanolib.measurement import Unsupported
from nanolib.models.attention import sparse
from nanolib.models.attention.block_mask import BlockMask, on_device, real_tensors
from nanolib.models.attention.work import Work


class Options(sparse.Options):
    """Options of `flex`: those of `sparse`."""


def unsupported(device: str, backward: bool) -> str:
    """Why FlexAttention cannot run there; empty when it can. To ask compiles nothing."""
    if backward and torch.device(device).type == "cpu":
        return "FlexAttention has no backward pass on CPU; use sparse, or measure with backward: false"
    return ""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    options: Options,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sparse attention by FlexAttention; see `nanolib.models.attention.attend`.

    Raises:
        Unsupported: A backward pass on CPU, which torch refuses.
    """
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if reason := unsupported(q.device.type, backward):
        raise Unsupported(reason)
    mask = sparse.choose_mask(q, k, causal=causal, options=options, scores=scores)
    if q.device.type == "cpu":  # it refuses inputs that ask for a gradient, even where none is taken
        q, k, v = (x.detach() for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    call = functools.partial(compiled(), q, k, v, block_mask=flex_mask(mask, q), scale=scale, enable_gqa=grouped)
    try:
        out = call()
    except torch._dynamo.exc.FailOnRecompileLimitHit:  # it forgets what it has compiled, and begins anew
        torch._dynamo.reset()
        out = call()
    return out.to(q.dtype)


@functools.cache
def compiled() -> Any:
    """FlexAttention through torch.compile, once per process.

    A full graph, since dynamo would else run all shapes beyond its limit unfused, and say nothing.
    """
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


_KERNEL_TILE = (
    128  # of queries and of keys: torch's kernels for GPUs need multiples of it, backward ones for Hopper too
)


def kernel_tile(device: str, block_size: int) -> int:
    """The tile in which the kernel skips: the one asked for, or on a GPU the next larger one that it can take."""
    if torch.device(device).type != "cuda":
        return block_size
    return -(-block_size // _KERNEL_TILE) * _KERNEL_TILE


_masks: dict[tuple[int, str], tuple[BlockMask, FlexMask]] = {}
_KEPT = 16


def flex_mask(mask: BlockMask, q: torch.Tensor) -> FlexMask:
    """The mask as FlexAttention wants it, kept for the next call with the same one."""
    key = (id(mask), str(q.device))
    if key not in _masks:
        while len(_masks) >= _KEPT:
            _masks.pop(next(iter(_masks)))
        _masks[key] = (mask, _made(mask, q))  # the mask is held too, so that its id stays its own
    return _masks[key][1]


def _made(mask: BlockMask, q: torch.Tensor) -> FlexMask:
    heads = q.shape[:2] if not mask.shared else (1, 1)
    with real_tensors():
        dense = torch.stack([mask.elements(head) for head in range(len(mask.plans))])
    dense = on_device(dense.reshape(*heads, mask.q_len, mask.kv_len), q.device)

    def keep(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return dense[b if heads[0] > 1 else 0, h if heads[1] > 1 else 0, i, j]

    return create_block_mask(
        keep,
        heads[0] if heads[0] > 1 else None,
        heads[1] if heads[1] > 1 else None,
        mask.q_len,
        mask.kv_len,
        device=str(q.device),
        BLOCK_SIZE=kernel_tile(q.device.type, mask.block_size),
    )


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> Work | None:
    """As `sparse` counts it."""
    return sparse.work(q_len, kv_len, causal=causal, options=options)
