"""torch's FlexAttention, compiled, over the masks of the sparse patterns: the same tiles, another kernel."""

from __future__ import annotations

import torch

from nanolib.measurement import Unsupported
from nanolib.models.attention import lowering, sparse
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
    mask = sparse.lowered_mask(q, k, causal=causal, options=options, scores=scores)
    if q.device.type == "cpu":  # it refuses inputs that ask for a gradient, even where none is taken
        q, k, v = (x.detach() for x in (q, k, v))
    return lowering.attend(q, k, v, mask, scale, sparse.key(options))


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> Work | None:
    """As `sparse` counts it."""
    return sparse.work(q_len, kv_len, causal=causal, options=options)
