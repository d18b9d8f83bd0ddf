# ruff: noqa: UP006, UP035, D417
"""Loop over heads and blocks of queries, in code that TorchScript compiles for parallel threads."""

# TorchScript needs the types of `typing`.

from typing import List, NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """A `QueryBlock` in types that TorchScript accepts.

    Attributes:
        first: Index of the first query of the block.
        last: Index after the last query of the block.
        keys: Number of keys that the block attends to.
        start: Index of the first key if the keys are one range, otherwise −1.
        unit: Number of keys in each piece. The keys of the block consist of such pieces.
        pieces: Indices of the pieces of all heads in one matrix product, int64. The indices of each
            head follow those of the previous head, because one dimension is fastest to gather.
        hidden_from: Index of the first key that at least one query of the block does not see.
        hidden: Whether a query does not see a key, bool [queries, keys from `hidden_from` on].
        blind: Whether at least one query sees no key.
    """

    first: int
    last: int
    keys: int
    start: int
    unit: int
    pieces: Tensor
    hidden_from: int
    hidden: Tensor
    blind: bool


class Schedule(NamedTuple):
    """The blocks of a loop, and the buffers that all blocks share.

    Attributes:
        blocks: All blocks that see at least one key.
        heads: Number of heads in one matrix product.
        scores: Buffer for the scores of a block. A new allocation for each block would be slower.
        keys: Buffer for gathered keys.
    """

    blocks: List[Block]
    heads: int
    scores: Tensor
    keys: Tensor


def forward(q: Tensor, out: Tensor, k: Tensor, v: Tensor, schedule: Schedule) -> None:
    """Compute attention over the kept keys.

    Args:
        q: Queries, shape [kv_heads, group, q_len, head_dim].
        out: Tensor to fill with the output, with the shape of `q`.
        k: Keys, shape [kv_heads, kv_len, head_dim].
        v: Values, with the shape of `k`.
    """
    for start in range(0, q.size(0), schedule.heads):
        stop = min(start + schedule.heads, q.size(0))
        for block in schedule.blocks:
            queries = get_rows(q[start:stop], block)
            part = get_keys(k[start:stop], block, schedule.keys)
            weights = softmax(queries, part, block, schedule)
            part = get_keys(v[start:stop], block, schedule.keys)
            set_rows(out[start:stop], torch.bmm(weights, part), block)


def backward(
    q: Tensor,
    d_out: Tensor,
    dq: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    schedule: Schedule,
) -> None:
    """Compute the gradients of `forward` from recomputed scores.

    Args:
        q: Queries, shape [kv_heads, group, q_len, head_dim].
        d_out: Gradient of the output, with the shape of `q`.
        dq: Tensor to fill with the gradient of `q`.
        k: Keys, shape [kv_heads, kv_len, head_dim].
        v: Values, with the shape of `k`.
        dk: Gradient of `k`. The loop adds the gradient of each block to this tensor.
        dv: Gradient of `v`. The loop adds the gradient of each block to this tensor.
    """
    for start in range(0, q.size(0), schedule.heads):
        stop = min(start + schedule.heads, q.size(0))
        for block in schedule.blocks:
            queries = get_rows(q[start:stop], block)
            d_results = get_rows(d_out[start:stop], block)
            part = get_keys(k[start:stop], block, schedule.keys)
            weights = softmax(queries, part, block, schedule)
            add_keys(dv[start:stop], torch.bmm(weights.transpose(1, 2), d_results), block)
            part = get_keys(v[start:stop], block, schedule.keys)
            d_scores = torch.bmm(d_results, part.transpose(1, 2))
            # The softmax's backward pass works row by row, so it can write to its input.
            torch._softmax_backward_data(d_scores, weights, -1, q.dtype, grad_input=d_scores)
            d_scores.mul_(q.size(3) ** -0.5)
            part = get_keys(k[start:stop], block, schedule.keys)
            set_rows(dq[start:stop], torch.bmm(d_scores, part), block)
            add_keys(dk[start:stop], torch.bmm(d_scores.transpose(1, 2), queries), block)


def get_rows(x: Tensor, block: Block) -> Tensor:
    """Return a block's rows: [heads, group, q_len, head_dim] → [heads, group · rows, head_dim]."""
    return x[:, :, block.first : block.last].reshape(x.size(0), -1, x.size(3))


def set_rows(into: Tensor, x: Tensor, block: Block) -> None:
    """Write `x` to the rows that `get_rows` reads."""
    into[:, :, block.first : block.last] = x.view(into.size(0), into.size(1), -1, into.size(3))


def softmax(queries: Tensor, keys: Tensor, block: Block, schedule: Schedule) -> Tensor:
    """Compute attention weights, shape [heads, group · rows, keys]. Hidden keys get weight 0."""
    heads, height = queries.size(0), queries.size(1)
    scores = schedule.scores[: heads * height * block.keys].view(heads, height, block.keys)
    scale = queries.size(2) ** -0.5
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0.0, alpha=scale, out=scores)
    by_head = scores.view(-1, block.last - block.first, block.keys)
    if block.hidden.numel() > 0:
        by_head[:, :, block.hidden_from :].masked_fill_(block.hidden, float("-inf"))
    torch.softmax(scores, -1, out=scores)
    if block.blind:
        by_head.masked_fill_(block.hidden.all(dim=-1, keepdim=True), 0.0)
    return scores


def get_keys(x: Tensor, block: Block, buffer: Tensor) -> Tensor:
    """Return a block's keys, shape [heads, keys, head_dim], copied only if the keys have gaps."""
    if block.start >= 0:
        return x[:, block.start : block.start + block.keys]
    width = block.unit * x.size(2)
    found = buffer[: x.size(0) * block.keys * x.size(2)]
    torch.index_select(
        x.reshape(-1, width), 0, pieces_of(x.size(0), block), out=found.view(-1, width)
    )
    return found.view(x.size(0), block.keys, x.size(2))


def add_keys(into: Tensor, x: Tensor, block: Block) -> None:
    """Add `x` to the keys that `get_keys` reads."""
    if block.start >= 0:
        into[:, block.start : block.start + block.keys] += x
    else:
        width = block.unit * into.size(2)
        into.view(-1, width).index_add_(0, pieces_of(into.size(0), block), x.reshape(-1, width))


def pieces_of(heads: int, block: Block) -> Tensor:
    """Return a block's pieces for `heads` heads. A loop's last product may have fewer heads."""
    return block.pieces[: heads * (block.keys // block.unit)]
