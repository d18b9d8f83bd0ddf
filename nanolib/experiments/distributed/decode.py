"""Measure decoding over a cache that is sharded across ranks, and fit a communication model."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanolib.experiments.distributed.launch import Launch, predict_traffic, time_calls
from nanolib.measurement import Measurement, Measurements, Provenance, exact
from nanolib.meters.links import count_bytes, time_collectives
from nanolib.meters.memory import MIB
from nanolib.models.attention.partial import partial_attention
from nanolib.models.attention.ranks import Sharding, Traffic, traffic_of
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.tree import tree_attention_decode
from nanolib.run.case import Ceilings, Plan, Predicted, RanksCase, asked_case, measure_on_ranks
from nanolib.run.memory_plan import shortage
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import LinkCost, link_cost

# In the call `one rank`, the first rank attends to all keys while the other ranks wait.
ONE_RANK = "one rank"
# The float64 check stores all keys on every rank, so nanolib checks at most this many elements.
_CHECKED_ELEMENTS = 2**25


@dataclass(frozen=True)
class SequenceCase(RanksCase):
    """Case of attention over a sequence that is sharded across ranks."""

    world_size: int
    seq_len: int
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    threads: int

    @property
    def shape(self) -> dict[str, int]:
        """Arguments of `traffic_of` that describe the shape."""
        return {
            "batch": self.batch_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "itemsize": getattr(torch, self.dtype).itemsize,
        }

    def __str__(self) -> str:
        what = type(self).__name__.removesuffix("Case").lower()
        return f"{what} {self.ranks} n={self.seq_len} batch={self.batch_size} {self.dtype}"


def random_heads(case: Any, generator: torch.Generator, heads: int, length: int) -> Tensor:
    """Return random queries, keys or values, shape [batch, heads, length, head_dim]."""
    like = {"dtype": getattr(torch, case.dtype), "device": generator.device}
    shape = (case.batch_size, heads, length, case.head_dim)
    return torch.randn(shape, generator=generator, **like)


@dataclass(frozen=True)
class DecodeCase(SequenceCase):
    """Case that decodes a new token over a sharded cache, with several algorithms."""

    algorithms: tuple[str, ...]

    @property
    def layout(self) -> Sharding:
        """Positions of the keys on each rank."""
        return Sharding.contiguous(self.seq_len, self.world_size)

    def shard_bytes(self, world_size: int) -> int:
        """Return the size of keys and values on the rank with the most keys, in bytes."""
        longest = -(-self.seq_len // world_size)
        per_key = 2 * self.batch_size * self.num_kv_heads * self.head_dim
        return per_key * self.shape["itemsize"] * longest

    def traffic(self, algorithm: str, world_size: int) -> Traffic:
        """Return the communication of one call of an algorithm on `world_size` ranks."""
        layout = Sharding.contiguous(self.seq_len, world_size)
        return traffic_of(algorithm, layout, **self.shape)

    def plan(self) -> Plan:
        """Plan the memory for the keys and values of all ranks that share this device."""
        return Plan({"decode": self.shard_bytes(self.world_size) * self.sharing})

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the communication steps and sent bytes of each algorithm, and the shard size."""
        sent = {name: self.traffic(name, self.world_size) for name in self.algorithms}
        return {"shard": self.shard_bytes(self.world_size) / MIB} | predict_traffic(sent)

    @property
    def _fits_one_rank(self) -> bool:
        """Whether the whole sequence fits in the memory of the first rank."""
        needed = self.plan().most + 2 * self.shard_bytes(1)
        return not shortage(Plan({"decode": needed}), self.device)

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the time, traffic and error of each algorithm, and fit a communication model."""
        alone = [ONE_RANK] if self.world_size > 1 and self._fits_one_rank else []
        launch = Launch(*measure_on_ranks(rank, self, params, alone=bool(alone)))
        link, rows = link_rows(launch, f"{self.world_size} ranks")
        yield from rows
        for scope in (*alone, *self.algorithms):
            yield launch.latency(scope)
        for algorithm in self.algorithms:
            yield from launch.speed_ups(algorithm, (*self.algorithms, *alone))
            traffic = self.traffic(algorithm, self.world_size)
            rows = [*launch.algorithm(algorithm, traffic, link and _sending_ms(link, traffic))]
            yield from rows
            if link:
                compute = next(row for row in rows if row.scope == f"{algorithm}: compute")
                for world in params.extrapolate_to_ranks:
                    if world > self.world_size:
                        yield self._modelled(algorithm, world, compute, link)
        size = self.shard_bytes(self.world_size) / MIB
        yield exact("weight_memory", size, scope="keys and values of a rank")

    def _modelled(
        self, algorithm: str, world: int, compute: Measurement, link: LinkCost
    ) -> Measurement:
        """Predict the latency on more ranks from evenly divided work and the fitted model."""
        sending = _sending_ms(link, self.traffic(algorithm, world))
        return Measurement(
            "latency",
            compute.estimate * self.world_size / world + sending,
            n=1,
            provenance=Provenance.MODELLED,
            method="alpha-beta",
            scope=f"{algorithm} at {world} ranks",
            flags=compute.flags,
            details={"algorithm": algorithm, "world_size": world},
        )


def _sending_ms(link: LinkCost, traffic: Traffic) -> float:
    return 1e3 * link.seconds(traffic.hops, max(traffic.sent))


def link_rows(launch: Launch, scope: str) -> tuple[LinkCost | None, list[Measurement]]:
    """Fit the cost per message and per byte to the times of collectives.

    Args:
        launch: Results from the ranks. The list `links` in each result contains the messages, the
            bytes and the scope of each collective.
        scope: Scope of the rows with the fitted cost.

    Returns:
        The fitted cost and the rows. The cost is None if too few sizes were timed. The rows
        contain the times of the collectives and, if there is one, the fitted cost.
    """
    rows = [launch.latency(**link) for link in launch.answers[0]["links"]]
    messages, sent = ([row.details[name] for row in rows] for name in ("messages", "sent"))
    try:
        link = link_cost(messages, sent, [np.median(row.samples) / 1e3 for row in rows])
    except TooFewSamples:
        return None, rows
    costs = zip(rows, messages, sent, strict=True)
    rows = [replace(row, predicted=1e3 * link.seconds(*cost)) for row, *cost in costs]
    fit = {
        "n": len(rows),
        "method": "least squares over collectives",
        "scope": scope,
        "flags": launch.flags,
        "details": {"residuals": list(link.residuals)},
    }
    rows.append(Measurement("link_latency", 1e3 * link.alpha, **fit))
    if link.beta:
        rows.append(Measurement("link_bandwidth", 1 / link.beta, **fit))
    return link, rows


@torch.no_grad()
def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """Time the algorithms on this rank, and return the times, errors and sent bytes."""
    case, seed, budget_s, device = asked_case(DecodeCase, asked)
    alone = asked["alone"]
    me, several = dist.get_rank(), case.world_size > 1
    links = time_collectives(budget_s, device=device, seed=seed) if several else []
    generator = torch.Generator(device).manual_seed(seed)  # All ranks draw the same queries.
    q = random_heads(case, generator, case.num_heads, 1)
    k, v = _shard(case, me, seed, device)
    is_checked = case.shard_bytes(1) <= _CHECKED_ELEMENTS * q.element_size()
    whole = None
    if is_checked or (alone and me == 0):
        shards = (_shard(case, number, seed, device) for number in range(case.world_size))
        whole = [torch.cat(parts, dim=2) for parts in zip(*shards, strict=True)]

    def decode(algorithm: str, shard: tuple[Tensor, ...] = (k, v), timer: Any = None) -> Any:
        return tree_attention_decode(
            q, *shard, algorithm=algorithm, layout=case.layout, timer=timer
        )

    def decode_in_parts(algorithm: str, timer: Any) -> None:
        with timer.time_block("comp_shard_kv"):
            shard = [case.layout.take(x, me) for x in whole] if is_checked else (k, v)
        decode(algorithm, shard, timer)

    calls = {algorithm: partial(decode, algorithm) for algorithm in case.algorithms}
    parts = {algorithm: partial(decode_in_parts, algorithm) for algorithm in case.algorithms}
    errors, counted = {}, {}
    if is_checked:
        reference = masked_attention(q, *whole, causal_mask(1, case.seq_len, device))
        errors = {name: relative_error(call(), reference) for name, call in calls.items()}
    if several:
        counted = {name: count_bytes(call) for name, call in calls.items()}
    if alone:
        calls[ONE_RANK] = lambda: partial_attention(q, *whole)[0].to(q.dtype) if me == 0 else None
    answer = time_calls(calls, parts, budget_s=budget_s, device=device, seed=seed)
    for link in links:
        link["scope"] = f"{link['collective']} of {link['payload']} B"
        answer["blocks"][link["scope"]] = link.pop("blocks")
    return answer | {"links": links, "errors": errors, "bytes": counted}


def _shard(case: DecodeCase, number: int, seed: int, device: torch.device) -> list[Tensor]:
    """Return the keys and values of one rank."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + number + 1)
    length = case.layout.length(number)
    return [random_heads(case, generator, case.num_kv_heads, length) for _ in range(2)]
