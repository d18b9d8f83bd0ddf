"""The checks of attention on every rank, against one process in float64; the tests assert their results."""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist

from nanolib.compat import profiled_tree_attn_decode
from nanolib.meters.links import count_bytes
from nanolib.meters.time.ranks import Timer
from nanolib.models.attention.ranks import Sharding, traffic_of
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.ring import ring_attention
from nanolib.models.attention.tree import ALGORITHMS, tree_attention_decode
from nanolib.models.attention.ulysses import ulysses_attention

_TREE_ALGORITHMS = ("three_allreduce", "fused", "gather")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def decode_shapes(world):
    """Name → batch, heads, kv_heads, q_len, keys per rank."""
    empty = [0] * (world - 1)
    return {
        "grouped": (1, 8, 2, 1, Sharding.contiguous(257, world)),
        "batch 3, several queries": (3, 8, 2, 5, Sharding.contiguous(100, world)),
        "one key, on the first rank": (1, 4, 4, 1, Sharding.from_lengths([1, *empty])),
        "one key, on the last rank": (3, 8, 2, 1, Sharding.from_lengths([*empty, 1])),
        "uneven, the first empty": (
            2,
            8,
            8,
            3,
            Sharding.from_lengths([17 * rank + 3 * (world == 1) for rank in range(world)]),
        ),
        "several queries on the last keys alone": (
            1,
            4,
            2,
            4,
            Sharding.from_lengths([*(3 for _ in empty), 4]),
        ),
    }


def check(_):
    """Errors by name, on this rank."""
    torch.manual_seed(0)
    errors = {}
    for name, dtype in DTYPES.items():
        errors |= {f"decode {what} {name}": error for what, error in _decode_errors(dtype).items()}
    errors |= _sequence_errors()
    return {
        "errors": errors,
        "rounds": _rounds(),
        "bytes": _bytes(),
        "profiled": _profiled(),
        "errors of input": _errors_of_input(),
    }


def _decode_errors(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for what, (batch, heads, kv_heads, q_len, layout) in decode_shapes(world).items():
        total = layout.total
        shapes = [
            (batch, heads, q_len, 16),
            (batch, kv_heads, total, 16),
            (batch, kv_heads, total, 16),
        ]
        q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
        expected = masked_attention(q, k, v, causal_mask(q_len, total))
        for algorithm in ALGORITHMS:
            parts = layout.take(k, rank), layout.take(v, rank)
            for given in (None, layout):
                out = tree_attention_decode(q, *parts, algorithm=algorithm, layout=given)
                assert out.dtype == dtype and out.shape == q.shape
                name = f"{what} {algorithm} {'with' if given else 'without'} layout"
                found[name] = relative_error(out, expected)
    return found


def _sequence_errors():
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for heads, kv_heads, causal, total in (
        (8, 2, True, 101),
        (8, 8, False, 101),
        (8, 8, True, 5),
        (8, 8, True, 96),
    ):
        q, k, v, grad = (
            torch.randn(2, count, total, 16) for count in (heads, kv_heads, kv_heads, heads)
        )
        whole = [x.double().requires_grad_() for x in (q, k, v)]
        mask = causal_mask(total, total) if causal else torch.ones(total, total, dtype=torch.bool)
        expected = masked_attention(*whole, mask)
        expected.backward(grad.double())
        for algorithm, layout in (
            ("ring", Sharding.contiguous(total, world)),
            ("ring without overlap", Sharding.contiguous(total, world)),
            ("zigzag", Sharding.zigzag(total, world)),
            ("ulysses", Sharding.contiguous(total, world)),
        ):
            if algorithm == "ulysses" and heads % world:
                continue
            mine = [layout.take(x, rank).clone().requires_grad_() for x in (q, k, v)]
            if algorithm == "ulysses":
                out = ulysses_attention(*mine, causal=causal, layout=layout)
            else:
                out = ring_attention(
                    *mine, causal=causal, layout=layout, overlap="without" not in algorithm
                )
            out.backward(layout.take(grad, rank))
            key = f"{algorithm} {heads}:{kv_heads} causal={causal} n={total}"
            if out.numel():
                found[f"{key} out"] = relative_error(
                    out.detach(), layout.take(expected.detach(), rank)
                )
            for name, x, reference in zip("qkv", mine, whole, strict=True):
                # Compared with the whole gradient: on the very first positions those of q and k are exactly zero.
                part = layout.take(reference.grad, rank)
                found[f"{key} gradient of {name}"] = float(
                    (x.grad.double() - part).norm() / reference.grad.norm()
                )
    return found


def _calls(algorithms, total, q_len, batch, heads, head_dim):
    """Algorithm, its call without gradients, and its traffic: decoding by `algorithms`, then a whole sequence."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = Sharding.contiguous(total, world)
    shape = {"batch": batch, "heads": heads, "kv_heads": heads, "head_dim": head_dim, "itemsize": 4}
    q, k, v = torch.randn(3, batch, heads, layout.length(rank), head_dim).unbind()
    queries = torch.randn(batch, heads, q_len, head_dim)
    for name in algorithms:
        call = functools.partial(
            tree_attention_decode, queries, k, v, algorithm=name, layout=layout
        )
        yield name, call, traffic_of(name, layout, q_len=q_len, **shape)
    whole = {"ring": ring_attention} | ({} if heads % world else {"ulysses": ulysses_attention})
    for name, attend in whole.items():
        call = functools.partial(attend, q, k, v, layout=layout)
        yield f"whole {name}", call, traffic_of(name, layout, **shape)


def _rounds():
    """Algorithm → collectives and exchanges of a call, and by formula."""
    found = {}
    names = ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "batch_isend_irecv")
    for algorithm, call, traffic in _calls(ALGORITHMS, 64, 1, 2, 8, 16):
        with contextlib.ExitStack() as stack, torch.no_grad():
            spies = [
                stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name)))
                for name in names
            ]
            call()
        found[algorithm] = [sum(spy.call_count for spy in spies), traffic.rounds]
    return found


@torch.no_grad()
def _bytes():
    """Algorithm → bytes that the interface counts, and by formula; payloads of a megabyte and more."""
    return {
        algorithm: [count_bytes(call, calls=2), sum(traffic.sent)]
        for algorithm, call, traffic in _calls(_TREE_ALGORITHMS, 2048, 256, 1, 8, 64)
    }


def _profiled():
    """What the timer counted, and how far the profiled output is from the plain one."""
    q, k, v = torch.randn(1, 8, 1, 16), *torch.randn(2, 1, 2, 100, 16).unbind()
    dist.broadcast(q, 0), dist.broadcast(k, 0), dist.broadcast(v, 0)
    timer = Timer()
    for _ in range(3):
        out = profiled_tree_attn_decode(q, k, v, timer)
    error = relative_error(out, masked_attention(q, k, v, causal_mask(1, 100)))
    return {
        "error": error,
        "names": list(timer.seconds),
        "calls": [len(s) for s in timer.seconds.values()],
        "shares": timer.shares(),
        "total": sum(timer.totals().values()),
    }


def _errors_of_input():
    """Messages of bad input, the same on every rank, before anything is sent."""
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8)
    messages = []
    for call in (
        lambda: tree_attention_decode(q, k, k, algorithm="trees"),
        lambda: tree_attention_decode(q, k, k[..., :4], algorithm="fused"),
        lambda: tree_attention_decode(q, k.bfloat16(), k.bfloat16()),
        lambda: ring_attention(q, k, k, layout=Sharding.contiguous(7, dist.get_world_size() + 1)),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages
