# ruff: noqa: UP006, UP035, D417  TorchScript knows lists by typing's names; what they hold is said once, at the top
"""The loops over heads and blocks of queries, written so that TorchScript can compile them: threads then run in parallel.

`block_sparse` calls them; its `_Lists` says what the lists and buffers hold.
"""

from typing import List

import torch


def forward(
    q: torch.Tensor,
    out: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: List[List[int]],
    keys: List[int],
    firsts: List[int],
    units: List[int],
    pieces: List[torch.Tensor],
    hidden_from: List[int],
    hidden: List[torch.Tensor],
    blind: List[torch.Tensor],
    together: int,
    scores_buffer: torch.Tensor,
    taken_buffer: torch.Tensor,
    scale: float,
) -> None:
    """Attention over the kept keys.

    Args:
        q: Shape [kv_heads, group, q_len, head_dim].
        out: Filled in, shape as `q`.
        k: Shape [kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        scale: Factor on the scores.
    """
    group, head_dim = q.size(1), q.size(3)
    start = 0
    while start < q.size(0):
        stop = min(start + together, q.size(0))
        count = stop - start
        for at in range(len(keys)):
            first, last, seen = rows[at][0], rows[at][1], keys[at]
            height = (last - first) * group
            part = taken(k[start:stop], firsts[at], seen, units[at], pieces[at], taken_buffer)
            queries = q[start:stop, :, first:last].reshape(count, height, head_dim)
            scores = scored(queries, part, scale, scores_buffer)
            softmax(scores, hidden_from[at], hidden[at], blind[at])
            part = taken(v[start:stop], firsts[at], seen, units[at], pieces[at], taken_buffer)
            out[start:stop, :, first:last] = torch.bmm(scores, part).view(count, group, -1, head_dim)
        start = stop


def backward(
    q: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    dq: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    rows: List[List[int]],
    keys: List[int],
    firsts: List[int],
    units: List[int],
    pieces: List[torch.Tensor],
    hidden_from: List[int],
    hidden: List[torch.Tensor],
    blind: List[torch.Tensor],
    together: int,
    scores_buffer: torch.Tensor,
    taken_buffer: torch.Tensor,
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
        scale: Factor on the scores.
    """
    group, head_dim = q.size(1), q.size(3)
    start = 0
    while start < q.size(0):
        stop = min(start + together, q.size(0))
        count = stop - start
        for at in range(len(keys)):
            first, last, seen, unit, index = rows[at][0], rows[at][1], keys[at], units[at], pieces[at]
            height = (last - first) * group
            queries = q[start:stop, :, first:last].reshape(count, height, head_dim)
            results = out[start:stop, :, first:last].reshape(count, height, head_dim)
            d_results = d_out[start:stop, :, first:last].reshape(count, height, head_dim)
            part = taken(k[start:stop], firsts[at], seen, unit, index, taken_buffer)
            weights = scored(queries, part, scale, scores_buffer)
            softmax(weights, hidden_from[at], hidden[at], blind[at])
            add(dv[start:stop], torch.bmm(weights.transpose(1, 2), d_results), firsts[at], seen, unit, index)
            part = taken(v[start:stop], firsts[at], seen, unit, index, taken_buffer)
            d_scores = torch.bmm(d_results, part.transpose(1, 2))
            d_scores.sub_((results * d_results).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
            part = taken(k[start:stop], firsts[at], seen, unit, index, taken_buffer)
            dq[start:stop, :, first:last] = torch.bmm(d_scores, part).view(count, group, -1, head_dim)
            add(dk[start:stop], torch.bmm(d_scores.transpose(1, 2), queries), firsts[at], seen, unit, index)
        start = stop


def scored(queries: torch.Tensor, keys: torch.Tensor, scale: float, buffer: torch.Tensor) -> torch.Tensor:
    """Scaled scores, shape [heads, rows, keys], in the buffer."""
    heads, rows, seen = queries.size(0), queries.size(1), keys.size(1)
    scores = buffer[: heads * rows * seen].view(heads, rows, seen)
    return torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0.0, alpha=scale, out=scores)


def softmax(scores: torch.Tensor, hidden_from: int, hidden: torch.Tensor, blind: torch.Tensor) -> None:
    """Of scores, shape [heads, rows, keys], in place; zero where a row sees no key."""
    if hidden.numel() > 0:
        scores[:, :, hidden_from:].masked_fill_(hidden, float("-inf"))
    torch.softmax(scores, -1, out=scores)
    if blind.numel() > 0:
        scores.masked_fill_(blind, 0.0)


def taken(x: torch.Tensor, first: int, seen: int, unit: int, index: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Keys of some heads, shape [heads, seen, head_dim]: a view where they lie in one piece, else gathered into `buffer`."""
    if first >= 0:
        return x[:, first : first + seen]
    heads, head_dim = x.size(0), x.size(2)
    found = buffer[: heads * seen * head_dim]
    # the heads that go together see the same keys, so the first of the index are theirs
    chosen = index[: heads * (seen // unit)]
    torch.index_select(x.reshape(-1, unit * head_dim), 0, chosen, out=found.view(-1, unit * head_dim))
    return found.view(heads, seen, head_dim)


def add(into: torch.Tensor, x: torch.Tensor, first: int, seen: int, unit: int, index: torch.Tensor) -> None:
    """Add what `taken` would take, shape [heads, seen, head_dim], back to where it came from."""
    if first >= 0:
        into[:, first : first + seen] += x
        return
    width = unit * into.size(2)
    chosen = index[: into.size(0) * (seen // unit)]
    into.view(-1, width).index_add_(0, chosen, x.reshape(-1, width))
