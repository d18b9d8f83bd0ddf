"""PyTorch's own attention across ranks, on devices that it supports; keys go around, as its default would gather them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nanolib.measurement import Unsupported


def why_not(device: str | torch.device) -> str:
    """Why the device cannot; empty where it can."""
    kind = torch.device(device).type
    if kind != "cuda":
        return f"torch's context_parallel has no ring for {kind}; it needs CUDA"
    return "torch's context_parallel has not been seen to work on a GPU by nanolib; use ring or zigzag"


@contextmanager
def context_parallel_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = True
) -> Iterator[Callable[[], torch.Tensor]]:
    """Attention of this rank's shard, as a call; the shards are torch's choice (two pieces each).

    Args:
        q: The whole sequence, shape [batch, heads, length, head_dim]; is replaced by a shard within the context.
        k: As `q`.
        v: As `q`.
        causal: Whether a query sees no later position.

    Raises:
        Unsupported: The device has no kernel for it.
    """
    if reason := why_not(q.device):
        raise Unsupported(reason)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("alltoall")
    mesh = init_device_mesh(q.device.type, (dist.get_world_size(),))
    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        yield lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
