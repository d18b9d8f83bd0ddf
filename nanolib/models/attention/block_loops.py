# ruff: noqa: UP006, UP035, D417  TorchScript knows lists by typing's names; the last argument is the same for both loops
"""The loops over heads and blocks of queries, written so that TorchScript can compile them: threads then run in parallel."""

from typing import List, NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """A block of queries and its keys: a `QueryBlock` as TorchScript takes it.

    Attributes:
        first: Its queries begin here,
        last: and end before this one.
        keys: How many keys it attends to.
        start: Where they begin, if they lie in one piece; else −1.
        unit: How long the equal pieces are that they consist of,
        pieces: and which pieces, int64, of all heads that go at once, one head after the other: along the first dimension alone is
            torch's gather a plain copy.
        hidden_from: From which key on some query does not see them,
        hidden: and which do not: bool [queries, keys from there].
        blind: Whether some query sees none.
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


class Turn(NamedTuple):
    """What goes through a loop.

    Attributes:
        blocks: All that see some key.
        together: How many heads go at once.
        scores: Room for their scores. Room serves all blocks: memory asked for anew would be cleared each time.
        keys: Room for their keys.
        scale: Factor on the scores.
    """

    blocks: List[Block]
    together: int
    scores: Tensor
    keys: Tensor
    scale: float


def forward(q: Tensor, out: Tensor, k: Tensor, v: Tensor, turn: Turn) -> None:
    """Attention over the kept keys.

    Args:
        q: Shape [kv_heads, group, q_len, head_dim].
        out: Filled in, shape as `q`.
        k: Shape [kv_heads, kv_len, head_dim].
        v: Shape as `k`.
    """
    for start in range(0, q.size(0), turn.together):
        stop = min(start + turn.together, q.size(0))
        for block in turn.blocks:
            queries = rows(q[start:stop], block)
            part = taken(k[start:stop], block, turn.keys)
            weights = softmax(queries, part, block, turn)
            part = taken(v[start:stop], block, turn.keys)
            put(out[start:stop], torch.bmm(weights, part), block)


def backward(
    q: Tensor,
    out: Tensor,
    d_out: Tensor,
    dq: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    turn: Turn,
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
    for start in range(0, q.size(0), turn.together):
        stop = min(start + turn.together, q.size(0))
        for block in turn.blocks:
            queries = rows(q[start:stop], block)
            results = rows(out[start:stop], block)
            d_results = rows(d_out[start:stop], block)
            part = taken(k[start:stop], block, turn.keys)
            weights = softmax(queries, part, block, turn)
            add(dv[start:stop], torch.bmm(weights.transpose(1, 2), d_results), block)
            part = taken(v[start:stop], block, turn.keys)
            d_scores = torch.bmm(d_results, part.transpose(1, 2))
            d_scores.sub_((results * d_results).sum(dim=-1, keepdim=True)).mul_(weights).mul_(
                turn.scale
            )
            part = taken(k[start:stop], block, turn.keys)
            put(dq[start:stop], torch.bmm(d_scores, part), block)
            add(dk[start:stop], torch.bmm(d_scores.transpose(1, 2), queries), block)


def rows(x: Tensor, block: Block) -> Tensor:
    """A block's rows of heads that share their keys: of [heads, group, q_len, head_dim], [heads, group · rows, head_dim]."""
    return x[:, :, block.first : block.last].reshape(x.size(0), -1, x.size(3))


def put(into: Tensor, x: Tensor, block: Block) -> None:
    """Put what `rows` would take where it belongs."""
    into[:, :, block.first : block.last] = x.view(into.size(0), into.size(1), -1, into.size(3))


def softmax(queries: Tensor, keys: Tensor, block: Block, turn: Turn) -> Tensor:
    """Attention weights, shape [heads, group · rows, keys], in the turn's room; zero where a query sees no key."""
    heads, height = queries.size(0), queries.size(1)
    scores = turn.scores[: heads * height * block.keys].view(heads, height, block.keys)
    torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0.0, alpha=turn.scale, out=scores)
    by_head = scores.view(-1, block.last - block.first, block.keys)
    if block.hidden.numel() > 0:
        by_head[:, :, block.hidden_from :].masked_fill_(block.hidden, float("-inf"))
    torch.softmax(scores, -1, out=scores)
    if block.blind:
        by_head.masked_fill_(block.hidden.all(dim=-1, keepdim=True), 0.0)
    return scores


def taken(x: Tensor, block: Block, room: Tensor) -> Tensor:
    """A block's keys of some heads, shape [heads, keys, head_dim]: a view where they lie in one piece, else copied to `room`."""
    if block.start >= 0:
        return x[:, block.start : block.start + block.keys]
    width = block.unit * x.size(2)
    found = room[: x.size(0) * block.keys * x.size(2)]
    torch.index_select(
        x.reshape(-1, width), 0, of_heads(x.size(0), block), out=found.view(-1, width)
    )
    return found.view(x.size(0), block.keys, x.size(2))


def add(into: Tensor, x: Tensor, block: Block) -> None:
    """Add what `taken` would take back to where it came from."""
    if block.start >= 0:
        into[:, block.start : block.start + block.keys] += x
    else:
        width = block.unit * into.size(2)
        into.view(-1, width).index_add_(0, of_heads(into.size(0), block), x.reshape(-1, width))


def of_heads(heads: int, block: Block) -> Tensor:
    """The pieces of so many heads, one head after the other: all heads of a turn attend to the same keys."""
    return block.pieces[: heads * (block.keys // block.unit)]
