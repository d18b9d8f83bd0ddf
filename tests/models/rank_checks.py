"""The checks of attention on every rank, against one process in float64; the tests assert their results."""

import contextlib

import torch
import torch.distributed as dist

from nanolib.compat import profiled_tree_attn_decode
from nanolib.meters.links import count_bytes
from nanolib.meters.time.timer import Timer
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.ring import ring_attention
from nanolib.models.attention.sharding import Sharding
from nanolib.models.attention.traffic import decode_traffic, prefill_traffic
from nanolib.models.attention.tree import ALGORITHMS, TREE_ALGORITHMS, tree_attention_decode
from nanolib.models.attention.ulysses import ulysses_attention

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


class _Counted:
    """Counts calls of collectives and exchanges of `torch.distributed`."""

    def __init__(self):
        self.rounds = 0
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        for name in (
            "all_reduce",
            "all_gather_into_tensor",
            "all_to_all_single",
            "batch_isend_irecv",
        ):
            self._wrap(name, getattr(dist, name))
        return self

    def _wrap(self, name, original):
        def counted(*arguments, **named):
            self.rounds += 1
            return original(*arguments, **named)

        setattr(dist, name, counted)
        self._undo.callback(setattr, dist, name, original)

    def __exit__(self, *error):
        self._undo.close()


def _whole_forms(world):
    """Those whose eight heads share out over the ranks."""
    return {"ring": ring_attention} | ({} if 8 % world else {"ulysses": ulysses_attention})


def _rounds():
    """Algorithm → rounds seen, and by formula."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = Sharding.contiguous(64, world)
    shape = {"batch": 2, "heads": 8, "kv_heads": 8, "head_dim": 16, "itemsize": 4}
    q, k, v = torch.randn(2, 8, 1, 16), *torch.randn(2, 2, 8, layout.length(rank), 16).unbind()
    found = {}
    for algorithm in ALGORITHMS:
        with _Counted() as counted:
            tree_attention_decode(q, k, v, algorithm=algorithm, layout=layout)
        found[algorithm] = [counted.rounds, decode_traffic(algorithm, layout, **shape).rounds]
    q = torch.randn(2, 8, layout.length(rank), 16)
    for algorithm, attend in _whole_forms(world).items():
        with _Counted() as counted, torch.no_grad():
            attend(q, k, v, layout=layout)
        found[algorithm] = [counted.rounds, prefill_traffic(algorithm, layout, **shape).rounds]
    return found


def _bytes():
    """Algorithm → bytes counted by the interface, and by formula; payloads of a megabyte and more."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout, shape = (
        Sharding.contiguous(2048, world),
        {"batch": 8, "heads": 32, "kv_heads": 32, "head_dim": 32, "itemsize": 4},
    )
    q = torch.randn(8, 32, 32, 32)
    k, v = torch.randn(2, 8, 32, layout.length(rank), 32).unbind()
    found = {}
    for algorithm in TREE_ALGORITHMS:
        counted = count_bytes(
            lambda algorithm=algorithm: tree_attention_decode(
                q, k, v, algorithm=algorithm, layout=layout
            ),
            calls=2,
        )
        found[algorithm] = [counted, decode_traffic(algorithm, layout, q_len=32, **shape).total]
    q, k, v = torch.randn(3, 1, 8, layout.length(rank), 64).unbind()
    shape = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "itemsize": 4}
    for algorithm, attend in _whole_forms(world).items():
        with torch.no_grad():
            counted = count_bytes(lambda attend=attend: attend(q, k, v, layout=layout), calls=2)
        found[algorithm] = [counted, prefill_traffic(algorithm, layout, **shape).total]
    return found


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
