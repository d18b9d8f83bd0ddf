"""Measure attention over a sequence that is sharded across ranks, and plan its memory."""

import contextlib
import functools
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from nanolib.experiments.distributed.launch import WHOLE, Launch, Share, draw, link_rows
from nanolib.measurement import Flag, Measurement, Measurements, Provenance
from nanolib.meters.machine import usable_cores
from nanolib.meters.memory import peak_memory
from nanolib.meters.ranks import (
    count_bytes,
    time_across_ranks,
    time_collectives,
    time_parts_across_ranks,
)
from nanolib.models.attention.ranks import Sharding, Traffic, traffic_of
from nanolib.numbers import MIB
from nanolib.run.case import Case, Ceilings, Plan, Predicted
from nanolib.run.memory_plan import Workload, plan_case
from nanolib.run.ranks import lacking, run_ranks
from nanolib.stats.intervals import LinkCost

PREFILL_ALGORITHMS = ("ring", "zigzag", "ulysses")
# The float64 check stores all scores and keys, so nanolib checks at most this many elements.
_CHECKED_ELEMENTS = 2**25


@dataclass(frozen=True)
class ShardedCase(Case):
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
        nodes: Number of machines. The factors omit `nodes` on a single machine.
    """

    supports_ab = False
    shares_launch = True
    VARIES = ("algorithm",)

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
    nodes: int = field(default=1, kw_only=True)

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank(s)" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")
        shape = f"n={self.seq_len} batch={self.batch_size} {self.dtype}"
        return f"{self.phase} {self.algorithm} {ranks} {shape}"

    @property
    def factors(self) -> dict[str, Any]:
        """The factors that define the case: name → value."""
        factors = super().factors
        if self.nodes == 1:
            del factors["nodes"]
        return factors

    @property
    def ranks_here(self) -> int:
        """The largest number of ranks on one machine."""
        return math.ceil(self.world_size / self.nodes)

    @property
    def ranks_on_cpu(self) -> int:
        """The number of ranks that share the cores and the memory of a machine, 0 on GPUs."""
        return 0 if self.device.startswith("cuda") else self.ranks_here

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs of the ranks on this machine, or the CPU that the ranks share."""
        if self.ranks_on_cpu:
            return (self.device,)
        return tuple(f"cuda:{n}" for n in range(min(self.ranks_here, torch.cuda.device_count())))

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
        split = Sharding.zigzag if self.algorithm == "zigzag" else Sharding.contiguous
        return split(self.seq_len, self.world_size)

    def traffic(self) -> Traffic | None:
        """Return the communication of one call, or None if there is no formula."""
        if self.algorithm in WHOLE or self.phase == "training":
            return None
        return traffic_of(
            self.algorithm,
            self.layout,
            batch=self.batch_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=getattr(torch, self.dtype).itemsize,
        )

    @property
    def is_checked(self) -> bool:
        """Whether a rank has the memory to compare its output with a float64 reference."""
        queries = 1 if self.phase == "decode" else self.seq_len / self.world_size
        rows = self.batch_size * self.num_heads * self.seq_len
        return rows * max(queries, self.head_dim) <= _CHECKED_ELEMENTS

    def unsupported_reason(self) -> str:
        """Return why the ranks cannot run the algorithm, or an empty string."""
        heads, kv_heads, ranks = self.num_heads, self.num_kv_heads, self.world_size
        shares_heads = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
        if self.algorithm == "ulysses" and not shares_heads:
            return (
                f"ulysses cannot split {heads} query heads and {kv_heads} key heads over {ranks} "
                "ranks; choose a divisor of both"
            )
        return lacking(self.device, 1 if self.phase == "memory" else ranks)

    def rank_plan(self) -> Plan:
        """Plan the peak memory of the first rank. Other ranks are simulated."""

        def workloads() -> Iterator[Workload]:
            tensors = draw(self, self.layout, 0, 0, torch.device(self.device))
            yield Workload(self.phase, Share(self, 0, tensors).call, lambda: tensors)

        with _pretended_ranks(self.world_size):
            return plan_case(self, workloads)

    def plan(self) -> Plan:
        """Plan the peak memory of all ranks that share this device."""
        plan = self.rank_plan()
        sharing = 1 if self.algorithm in WHOLE else max(1, self.ranks_on_cpu)
        return Plan({scope: peak * sharing for scope, peak in plan.peaks.items()}, plan.reason)

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the peak memory of a rank in MiB, the communication steps and the sent bytes."""
        most, traffic = self.rank_plan().most, self.traffic()
        predicted = {} if most is None else {"peak_memory": most / MIB}
        if traffic:
            predicted["communication steps"] = traffic.rounds
            predicted["bytes sent per rank"] = max(traffic.sent)
        return predicted

    def launch(
        self, cases: Sequence["ShardedCase"], params
    ) -> Iterator[tuple["ShardedCase", Measurement]]:
        """Measure algorithms in turns on the same ranks, and yield each case with its rows.

        The times of collectives and the communication model belong to the first case.
        """
        request = {"seed": params.seed, "budget_s": params.budget_s}
        answers = run_ranks(
            rank,
            request | {"cases": [case.factors for case in cases]},
            world_size=self.world_size,
            device=self.device,
            # The ranks end before the case's own limit, so that the error can name the slow rank.
            timeout_s=0.9 * params.case_timeout_s,
            threads=self.threads,
            rank_timeout_s=params.rank_timeout_s,
            private_network=params.private_network,
        )
        is_oversubscribed = self.ranks_on_cpu * self.threads > usable_cores()
        launch = Launch(answers, (Flag.OVERSUBSCRIBED,) if is_oversubscribed else ())
        link, rows = link_rows(launch)
        yield from ((cases[0], row) for row in rows)
        for case in cases:
            yield from ((case, row) for row in case._rows(launch, link, params))

    def _rows(self, launch: Launch, link: LinkCost | None, params) -> Measurements:
        yield from launch.rows(self)
        traffic = self.traffic()
        sending_ms = _sending_ms(link, traffic) if link and traffic else None
        parts = {part.scope: part for part in launch.parts(self.algorithm, sending_ms)}
        yield from parts.values()
        if sending_ms is None:
            return
        for world in (self.world_size, *params.extrapolate_to_ranks):
            if world >= self.world_size:
                # The ranks divide the work evenly, and the fitted model gives the communication.
                compute_ms = parts["compute"].estimate * self.world_size / world
                yield Measurement(
                    "latency",
                    compute_ms + _sending_ms(link, replace(self, world_size=world).traffic()),
                    n=1,
                    provenance=Provenance.MODELLED,
                    method="alpha-beta",
                    scope=f"{self.phase} at {world} ranks",
                    flags=launch.flags,
                    details={"world_size": world},
                )


def _sending_ms(link: LinkCost, traffic: Traffic) -> float:
    return 1e3 * link.seconds(traffic.hops, max(traffic.sent))


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
    cases = [ShardedCase(**factors) for factors in asked["cases"]]
    seed, budget_s = asked["seed"], asked["budget_s"]
    device = torch.device(cases[0].device.split(":")[0])
    me, how, links = dist.get_rank(), {"device": device, "seed": seed}, []
    if dist.get_world_size() > 1 and cases[0].phase == "decode":
        links = time_collectives(budget_s, **how)
    # Algorithms with equal layouts share the tensors of this rank.
    drawn = functools.cache(functools.partial(draw, cases[0], seed=seed, device=device))
    whole = Sharding.contiguous(cases[0].seq_len, 1)
    calls, parts, found = {}, {}, {}
    for case in cases:
        name = case.algorithm
        share = Share(case, me, drawn(case.layout, me), drawn(whole, 0) if case.is_checked else ())
        share.call()
        with peak_memory(device, *share.tensors) as peak:
            share.call()
        calls[name], found[name] = share.call, {"peak": peak.own_bytes, "method": peak.method}
        if case.phase != "training":
            parts[name] = share.run_in_parts
        if case.is_checked:
            found[name]["error"] = share.error()
        if case.traffic():
            found[name]["bytes"] = count_bytes(share.call)
    blocks, busy = time_across_ranks(calls, budget_s, **how)
    for link in links:
        link["scope"] = f"{link['collective']} of {link['payload']} B"
        blocks[link["scope"]] = link.pop("blocks")
    return {
        "blocks": blocks,
        "busy": busy,
        "found": found,
        "links": links,
        "parts": time_parts_across_ranks(parts, budget_s, device=device),
    }
