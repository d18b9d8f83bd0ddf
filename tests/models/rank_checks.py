"""Checks of attention on every rank, against one process in float64; tests assert their results."""

import functools
from unittest import mock

import torch
import torch.distributed as dist

from nanolib.meters.ranks import count_bytes
from nanolib.models.attention.ranks import Sharding, traffic_of
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sequence import ring_attention, ulysses_attention
from nanolib.models.attention.tree import ALGORITHMS, tree_attention_decode
from tests.models.inputs import qkv


def check(_):
    """What this rank found."""
    torch.manual_seed(0)
    return {
        "errors": dict([*_decode_errors(), *_sequence_errors()]),
        "traffic": _traffic(),
    }


def _decode_shapes(world):
    """Batch, heads, kv_heads, keys per rank."""
    empty, uneven = [0] * (world - 1), [17 * rank + 3 * (world == 1) for rank in range(world)]
    return (
        (1, 8, 2, Sharding.contiguous(257, world)),
        (3, 8, 2, Sharding.from_lengths([*empty, 1])),
        (2, 8, 8, Sharding.from_lengths(uneven)),
    )


def _decode_errors():
    rank, world = dist.get_rank(), dist.get_world_size()
    for batch, heads, kv_heads, layout in _decode_shapes(world):
        for dtype in (torch.float32, torch.bfloat16):
            q = torch.randn(batch, heads, 1, 16).to(dtype)
            total = sum(layout.lengths)
            k, v = torch.randn(2, batch, kv_heads, total, 16).to(dtype).unbind()
            expected = masked_attention(q, k, v, causal_mask(1, total))
            parts = layout.take(k, rank), layout.take(v, rank)
            for algorithm in ALGORITHMS:
                out = tree_attention_decode(q, *parts, algorithm=algorithm, layout=layout)
                assert out.dtype == dtype and out.shape == q.shape
                shape = f"{batch} {heads}:{kv_heads} over {layout.pieces}"
                yield f"decode {shape} {dtype} {algorithm}", relative_error(out, expected)


def _sequence_errors():
    rank, world = dist.get_rank(), dist.get_world_size()
    for kv_heads, causal, total in ((2, True, 101), (8, False, 101), (8, True, 5), (8, True, 96)):
        whole = qkv(2, 8, kv_heads, total, total)
        mask = causal_mask(total, total) if causal else torch.ones(total, total, dtype=torch.bool)
        expected = masked_attention(*whole, mask)
        grad = torch.randn(expected.shape)
        expected.backward(grad.double())
        for algorithm, attend, shard in (
            ("ring", ring_attention, Sharding.contiguous),
            ("zigzag", ring_attention, Sharding.zigzag),
            ("ulysses", ulysses_attention, Sharding.contiguous),
        ):
            if algorithm == "ulysses" and 8 % world:
                continue
            layout = shard(total, world)
            mine = [layout.take(x.detach(), rank).clone().requires_grad_() for x in whole]
            out = attend(*mine, causal=causal, layout=layout)
            out.backward(layout.take(grad, rank))
            key = f"{algorithm} 8:{kv_heads} causal={causal} n={total}"
            part = layout.take(expected.detach(), rank)
            yield f"{key} out", relative_error(out.detach(), part)
            for name, x, reference in zip("qkv", mine, whole, strict=True):
                # Compared with the whole gradient: on the first positions, q's and k's are zero.
                difference = x.grad.double() - layout.take(reference.grad, rank)
                error = difference.norm() / reference.grad.norm()
                yield f"{key} gradient of {name}", float(error)


def _calls():
    """Algorithm, its call, and its traffic of over a megabyte: decoding, then a whole sequence."""
    rank, world = dist.get_rank(), dist.get_world_size()
    heads, head_dim, batch = 8, 64, 256
    shape = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "itemsize": 4}
    layout = Sharding.contiguous(16, world)
    query = torch.randn(batch, heads, 1, head_dim)
    k, v = torch.randn(2, batch, heads, layout.lengths[rank], head_dim).unbind()
    for name in ALGORITHMS:
        call = functools.partial(tree_attention_decode, query, k, v, algorithm=name, layout=layout)
        yield name, call, traffic_of(name, layout, batch=batch, **shape)
    layout = Sharding.contiguous(2048, world)
    q, k, v = torch.randn(3, 1, heads, layout.lengths[rank], head_dim).unbind()
    whole = {"ring": ring_attention} | ({} if heads % world else {"ulysses": ulysses_attention})
    for name, attend in whole.items():
        call = functools.partial(attend, q, k, v, layout=layout)
        yield f"whole {name}", call, traffic_of(name, layout, batch=1, **shape)


@torch.no_grad()
def _traffic():
    """Algorithm → collectives and exchanges of a call, bytes on the interface, both by formula."""
    found = {}
    names = ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv")
    for algorithm, call, traffic in _calls():
        spies = {name: mock.Mock(wraps=getattr(dist, name)) for name in names}
        with mock.patch.multiple(dist, **spies):
            call()
        rounds = sum(spy.call_count for spy in spies.values())
        counted = count_bytes(call)
        found[algorithm] = [rounds, counted, traffic.rounds, sum(traffic.sent)]
    return found
