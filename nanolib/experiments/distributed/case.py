"""Measure attention over a sequence that is sharded across ranks, and plan its memory."""

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nanolib.experiments.distributed.launch import Launch, link_rows
from nanolib.experiments.distributed.share import Share, draw
from nanolib.measurement import Measurement, Measurements, Provenance, exact
from nanolib.meters.memory import peak_memory
from nanolib.meters.ranks import (
    count_bytes,
    time_across_ranks,
    time_collectives,
    time_parts_across_ranks,
)
from nanolib.models.attention.ranks import Sharding, Traffic, traffic_of
from nanolib.numbers import MIB
from nanolib.run.case import Ceilings, Plan, Predicted, RanksCase, asked_cases, measure_on_ranks
from nanolib.run.memory_plan import Workload, planned
from nanolib.run.ranks import lacking
from nanolib.stats.scaling import LinkCost

DECODE, FORWARD, TRAINING, MEMORY = "decode", "forward", "training", "memory"
RING, ZIGZAG, ULYSSES, DENSE, MATH = "ring", "zigzag", "ulysses", "dense", "math"
PREFILL_ALGORITHMS = (RING, ZIGZAG, ULYSSES)
# Only the first rank computes these algorithms, and the other ranks wait.
WHOLE = (DENSE, MATH)
# The float64 check stores all scores and keys, so nanolib checks at most this many elements.
_CHECKED_ELEMENTS = 2**25


@dataclass(frozen=True)
class ShardedCase(RanksCase):
    """Case of one algorithm over a sequence that is sharded across ranks.

    The algorithms of one shape are a group, and run in turns on the same ranks. `dense` is the
    baseline: the first rank attends to the whole sequence while the other ranks wait.

    Attributes:
        phase: `decode` for one new token, `forward` for a forward pass over the whole sequence,
            `training` for a forward and a backward pass, or `memory` to plan a forward pass.
        algorithm: Name of the algorithm.
        world_size: Number of ranks.
        seq_len: Length of the sequence, or of the cache in decoding.
        batch_size: Sequences per batch.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads.
        head_dim: Width of a head.
        dtype: Dtype of q, k and v.
        threads: Number of threads of each rank on a CPU.
    """

    VARIES: ClassVar = ("algorithm",)

    phase: str
    algorithm: str
    world_size: int
    seq_len: int
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    threads: int

    def __str__(self) -> str:
        shape = f"n={self.seq_len} batch={self.batch_size} {self.dtype}"
        return f"{self.phase} {self.algorithm} {self.ranks} {shape}"

    @property
    def inputs_id(self) -> str:
        """Positions of the keys on each rank. Algorithms with equal positions share tensors."""
        return str(self.layout.pieces)

    @property
    def is_baseline(self) -> bool:
        """Every algorithm is a baseline, because findings also rank algorithms."""
        return True

    @property
    def layout(self) -> Sharding:
        """Positions of the keys on each rank."""
        if self.algorithm in WHOLE:
            return Sharding.from_lengths([self.seq_len] + [0] * (self.world_size - 1))
        return self._split(self.world_size)

    def _split(self, world_size: int) -> Sharding:
        split = Sharding.zigzag if self.algorithm == ZIGZAG else Sharding.contiguous
        return split(self.seq_len, world_size)

    def traffic(self, world_size: int) -> Traffic | None:
        """Return the communication of one call on some ranks, or None if there is no formula."""
        if self.algorithm in WHOLE or self.phase == TRAINING:
            return None
        return traffic_of(
            self.algorithm,
            self._split(world_size),
            batch=self.batch_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=getattr(torch, self.dtype).itemsize,
        )

    @property
    def is_checked(self) -> bool:
        """Whether a rank has the memory to compare its output with a float64 reference."""
        queries = 1 if self.phase == DECODE else self.seq_len / self.world_size
        rows = self.batch_size * self.num_heads * self.seq_len
        return rows * max(queries, self.head_dim) <= _CHECKED_ELEMENTS

    def unsupported(self) -> str:
        """Return why the ranks cannot run the algorithm, or an empty string."""
        heads, kv_heads, ranks = self.num_heads, self.num_kv_heads, self.world_size
        shares_heads = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
        if self.algorithm == ULYSSES and not shares_heads:
            return (
                f"ulysses cannot split {heads} query heads and {kv_heads} key heads over {ranks} "
                "ranks; choose a divisor of both"
            )
        return lacking(self.device, 1 if self.phase == MEMORY else ranks)

    def rank_plan(self) -> Plan:
        """Plan the peak memory of the first rank. Other ranks are simulated."""

        def workloads() -> Iterator[Workload]:
            tensors = draw(self, self.layout, 0, 0, torch.device(self.device))
            yield Workload(self.phase, Share(self, 0, tensors).call, lambda: tensors)

        with _pretended_ranks(self.world_size):
            return planned(self, workloads)

    def plan(self) -> Plan:
        """Plan the peak memory of all ranks that share this device."""
        one, sharing = self.rank_plan(), 1 if self.algorithm in WHOLE else self.sharing
        return Plan({scope: peak * sharing for scope, peak in one.peaks.items()}, one.reason)

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the peak memory of a rank in MiB, the communication steps and the sent bytes."""
        most, traffic = self.rank_plan().most, self.traffic(self.world_size)
        predicted = {} if most is None else {"peak_memory": most / MIB}
        if traffic:
            predicted["communication steps"] = traffic.rounds
            predicted["bytes sent per rank"] = max(traffic.sent)
        return predicted

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the algorithm alone."""
        return (row for _, row in self.launch([self], params))

    def launch(
        self, cases: Sequence["ShardedCase"], params: Any
    ) -> Iterator[tuple["ShardedCase", Measurement]]:
        """Measure algorithms in turns on the same ranks, and yield each case with its rows.

        The times of collectives and the communication model belong to the first case.
        """
        launch = Launch(*measure_on_ranks(rank, cases, params))
        link, rows = link_rows(launch, f"{self.world_size} ranks")
        yield from ((cases[0], row) for row in rows)
        for case in cases:
            others = [other.algorithm for other in cases if other is not case]
            yield from ((case, row) for row in case._rows(launch, link, others, params))

    def _rows(
        self, launch: Launch, link: LinkCost | None, others: Sequence[str], params: Any
    ) -> Measurements:
        name, traffic = self.algorithm, self.traffic(self.world_size)
        yield launch.latency(name, self.phase)
        yield from launch.speed_ups(name, others, self.phase)
        planned_mib = self.predict().get("peak_memory")
        yield from launch.counts(name, self.phase, traffic, planned_mib)
        if not (link and traffic):
            yield from launch.parts(name)
            return
        parts = {part.scope: part for part in launch.parts(name, _sending_ms(link, traffic))}
        yield from parts.values()
        for world in (self.world_size, *params.extrapolate_to_ranks):
            if world >= self.world_size:
                yield self._modelled(world, parts["compute"], link)

    def _modelled(self, world: int, compute: Measurement, link: LinkCost) -> Measurement:
        """Predict the latency on some ranks from evenly divided work and the fitted model."""
        sending_ms = _sending_ms(link, self.traffic(world))
        return Measurement(
            "latency",
            compute.estimate * self.world_size / world + sending_ms,
            n=1,
            provenance=Provenance.MODELLED,
            method="alpha-beta",
            scope=f"{self.phase} at {world} ranks",
            flags=compute.flags,
            details={"world_size": world},
        )


def _sending_ms(link: LinkCost, traffic: Traffic) -> float:
    return 1e3 * link.seconds(traffic.hops, max(traffic.sent))


@dataclass(frozen=True)
class MemoryCase(ShardedCase):
    """Case that plans the peak memory of a rank in a forward pass, and runs nothing."""

    VARIES: ClassVar = ()  # Nothing is timed, so the case has no group.

    def plan(self) -> Plan:
        """Return no peak, because the case allocates no memory."""
        return Plan(reason="the case is planned, not run")

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Yield the planned peak memory of a rank."""
        if (most := self.rank_plan().most) is not None:
            how = {"method": "plan", "provenance": Provenance.MODELLED}
            yield exact("peak_memory", most / MIB, scope=self.phase, **how)


@contextlib.contextmanager
def _pretended_ranks(world_size: int) -> Iterator[None]:
    """Create a process group whose collectives do nothing, because fake tensors have no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch replaces this hook and never restores the original.
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with warnings.catch_warnings():
            # Only the newest torch has the new name of this collective.
            warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure the algorithms on this rank, and return a result for `Launch`."""
    cases, seed, budget_s, device = asked_cases(ShardedCase, asked)
    me, several, how = dist.get_rank(), dist.get_world_size() > 1, {"device": device, "seed": seed}
    links = []
    if several and cases[0].phase == DECODE:
        links = time_collectives(budget_s, **how)
    whole = Sharding.contiguous(cases[0].seq_len, 1)
    drawn = {}  # Algorithms with equal layouts share the tensors of this rank.
    calls, parts, found = {}, {}, {}
    for case in cases:
        for layout in (case.layout, *([whole] if case.is_checked else [])):
            if layout not in drawn:
                at = 0 if layout == whole else me
                drawn[layout] = draw(case, layout, at, seed, device)
        name, share = case.algorithm, Share(case, me, drawn[case.layout], drawn.get(whole, ()))
        share.call()
        with peak_memory(device, *share.tensors) as peak:
            share.call()
        calls[name], found[name] = share.call, {"peak": peak.own, "method": peak.method}
        if case.phase != TRAINING:
            parts[name] = share.in_parts
        if case.is_checked:
            found[name]["error"] = share.error()
        if several and case.traffic(case.world_size):
            found[name]["bytes"] = count_bytes(share.call, calls=2)
    blocks, busy = time_across_ranks(calls, budget_s, **how)
    for link in links:
        link["scope"] = f"{link['collective']} of {link['payload']} B"
        blocks[link["scope"]] = link.pop("blocks")
    timed = {"blocks": blocks, "busy": busy, "found": found, "links": links}
    return timed | {"parts": time_parts_across_ranks(parts, budget_s, device=device)}
