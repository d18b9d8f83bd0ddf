# ruff: noqa: UP006, UP035, D417  TorchScript knows lists by typing's names; what they hold is said once, at the top
"""The loops over heads and blocks of queries, written so that TorchScript can compile them: threads then run in parallel.

Both take, beside their tensors: `blocks`, what `QueryBlock.numbers` says of each block that sees some key; `pieces` and `hidden`,
those of `QueryBlock`; `together`, how many heads go at once; room for their scores and for their keys; and the factor on the
scores. Room serves all blocks: memory asked for anew would be cleared each time.
"""

from typing import List

import torch
from torch import Tensor


def forward(
    q: Tensor,
    out: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: List[List[int]],
    pieces: List[Tensor],
    hidden: List[Tensor],
    together: int,
    scores_room: Tensor,
    keys_room: Tensor,
    scale: float,
) -> None:
    """Attention over the kept keys.

    Args:
        q: Shape [kv_heads, group, q_len, head_dim].
        out: Filled in, shape as `q`.
        k: Shape [kv_heads, kv_len, head_dim].
        v: Shape as `k`.
    """
    for start in range(0, q.size(0), together):
        stop = min(start + together, q.size(0))
        for at in range(len(blocks)):
            first, last = blocks[at][0], blocks[at][1]
            queries = rows(q[start:stop, :, first:last])
            part = taken(k[start:stop], blocks[at], pieces[at], keys_room)
            weights = softmax(queries, part, blocks[at], hidden[at], scale, scores_room)
            part = taken(v[start:stop], blocks[at], pieces[at], keys_room)
            out[start:stop, :, first:last] = torch.bmm(weights, part).view(stop - start, q.size(1), -1, q.size(3))


def backward(
    q: Tensor,
    out: Tensor,
    d_out: Tensor,
    dq: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    blocks: List[List[int]],
    pieces: List[Tensor],
    hidden: List[Tensor],
    together: int,
    scores_room: Tensor,
    keys_room: Tensor,
    scale: float,
) -> None:
    """Its gradients, from scores that are computed again.

    Args:
        q: Shape [kv_heads, group, q_len, head_dim].
        out: What `forward` gave, shape as `q`.
        d_out: Its gradient.
        dq: Filled in, shape as `q`.
        k: Shape [kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        dk: Added to, shape as `k`.
        dv: Added to, shape as `k`.
    """
    for start in range(0, q.size(0), together):
        stop = min(start + together, q.size(0))
        for at in range(len(blocks)):
            block, piece = blocks[at], pieces[at]
            first, last = block[0], block[1]
            queries = rows(q[start:stop, :, first:last])
            results = rows(out[start:stop, :, first:last])
            d_results = rows(d_out[start:stop, :, first:last])
            part = taken(k[start:stop], block, piece, keys_room)
            weights = softmax(queries, part, block, hidden[at], scale, scores_room)
            add(dv[start:stop], torch.bmm(weights.transpose(1, 2), d_results), block, piece)
            part = taken(v[start:stop], block, piece, keys_room)
            d_scores = torch.bmm(d_results, part.transpose(1, 2))
            d_scores.sub_((results * d_results).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
            part = taken(k[start:stop], block, piece, keys_room)
            dq[start:stop, :, first:last] = torch.bmm(d_scores, part).view(stop - start, q.size(1), -1, q.size(3))
            add(dk[start:stop], torch.bmm(d_scores.transpose(1, 2), queries), block, piece)


def rows(x: Tensor) -> Tensor:
    """Those of heads that share their keys in a row: [heads, group, n, head_dim] → [heads, group · n, head_dim]."""
    return x.reshape(x.size(0), -1, x.size(3))


def softmax(queries: Tensor, keys: Tensor, block: List[int], hidden: Tensor, scale: float, room: Tensor) -> Tensor:
    """Attention weights, shape [heads, group · n, keys], in `room`; zero where a query sees no key."""
    heads, height, seen = queries.size(0), queries.size(1), keys.size(1)
    scores = room[: heads * height * seen].view(heads, height, seen)
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0.0, alpha=scale, out=scores)
    by_head = scores.view(-1, block[1] - block[0], seen)
    if hidden.numel() > 0:
        by_head[:, :, block[5] :].masked_fill_(hidden, float("-inf"))
    torch.softmax(scores, -1, out=scores)
    if block[6] > 0:
        by_head.masked_fill_(hidden.all(dim=-1, keepdim=True), 0.0)
    return scores


def taken(x: Tensor, block: List[int], pieces: Tensor, room: Tensor) -> Tensor:
    """A block's keys of some heads, shape [heads, keys, head_dim]: a view where they lie in one piece, else copied to `room`."""
    if block[3] >= 0:
        return x[:, block[3] : block[3] + block[2]]
    width = block[4] * x.size(2)
    found = room[: x.size(0) * block[2] * x.size(2)]
    torch.index_select(x.reshape(-1, width), 0, of_heads(x, block, pieces), out=found.view(-1, width))
    return found.view(x.size(0), block[2], x.size(2))


def add(into: Tensor, x: Tensor, block: List[int], pieces: Tensor) -> None:
    """Add what `taken` would take back to where it came from."""
    if block[3] >= 0:
        into[:, block[3] : block[3] + block[2]] += x
        return
    width = block[4] * into.size(2)
    into.view(-1, width).index_add_(0, of_heads(into, block, pieces), x.reshape(-1, width))


def of_heads(x: Tensor, block: List[int], pieces: Tensor) -> Tensor:
    """The pieces of all heads, one head after the other: along the first dimension alone is torch's gather a plain copy."""
    if x.size(0) == 1:
        return pieces
    return (torch.arange(x.size(0))[:, None] * (x.size(1) // block[4]) + pieces).view(-1)
