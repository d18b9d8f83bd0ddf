"""Define the parameters and the cases of the distributed notebook."""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from pydantic import Field, field_validator, model_validator

from nanolib.experiments.distributed.case import PREFILL_ALGORITHMS, WHOLE, ShardedCase
from nanolib.measurement import Measurements, Provenance, Unsupported, exact
from nanolib.meters.machine import resolve_device
from nanolib.models.attention.tree import ALGORITHMS
from nanolib.numbers import MIB
from nanolib.run import case as shared
from nanolib.run.case import Batch, Case, Ceilings, Count, Dtypes, Grid, Length, Plan, check_heads
from nanolib.run.ranks import HANG_S, nodes_of


class Params(shared.Params):
    """Parameters of the distributed notebook.

    Attributes:
        world_sizes: Numbers of ranks to measure.
        seq_lens: Lengths of the sharded cache in decoding, tokens, or empty for no decoding.
        algorithms: Decoding algorithms to measure: `three_allreduce`, `fused`, `gather`, `ring`,
            `pass_q`.
        prefill_seq_lens: Sequence lengths of prefill, tokens, or empty for no prefill.
        prefill_algorithms: Prefill algorithms to measure: `ring`, `zigzag`, `ulysses`.
        backward: Whether to measure the backward pass of prefill too.
        memory_seq_lens: Sequence lengths to plan peak memory for, tokens, or empty for none.
        batch_size: Sequences per batch.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads, a divisor of `num_heads`.
        head_dim: Width of a head.
        dtypes: Dtypes of q, k and v.
        threads: Number of threads of each rank on a CPU.
        extrapolate_to_ranks: Numbers of ranks for which the cost model predicts the latency.
        rank_timeout_s: Longest time that a rank waits for another rank, s.
        private_network: Whether to give the ranks a private network, if the system allows it, to
            count the bytes that the ranks send.
    """

    NAME = "distributed"
    MAIN = (
        "world_sizes",
        "seq_lens",
        "algorithms",
        "prefill_seq_lens",
        "prefill_algorithms",
        "memory_seq_lens",
        "batch_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "device",
        "budget_s",
        "label",
    )

    world_sizes: Grid[Count] = Field([1, 2])
    seq_lens: list[Length] = Field([32768])
    algorithms: list[Literal[ALGORITHMS]] = Field(
        ["three_allreduce", "fused", "gather", "pass_q"], min_length=1
    )
    prefill_seq_lens: list[Length] = Field([1024])
    prefill_algorithms: list[Literal[PREFILL_ALGORITHMS]] = Field(["ring", "zigzag"], min_length=1)
    backward: bool = False
    memory_seq_lens: list[Length] = Field([1024, 16384, 131072, 1048576])
    batch_size: Batch = 1
    num_heads: Count = 8
    num_kv_heads: Count = 8
    head_dim: Count = 64
    dtypes: Dtypes = Field(["float32"])
    threads: Count = 1
    extrapolate_to_ranks: list[Count] = Field([4, 8, 16])
    rank_timeout_s: float = Field(HANG_S, gt=0, le=86_400)
    private_network: bool = True

    @field_validator("trace")
    @classmethod
    def _check_trace(cls, value: bool) -> bool:
        if value:
            raise ValueError("calls in the processes of ranks are not traced; leave trace out")
        return value

    _heads_divide = model_validator(mode="after")(check_heads)


@dataclass(frozen=True)
class MemoryCase(ShardedCase):
    """Case that plans the peak memory of a rank in a forward pass, and runs nothing."""

    shares_launch = False
    VARIES = ()  # Nothing is timed, so the case has no group.

    def plan(self) -> Plan:
        """Return no peak, because the case allocates no memory."""
        return Plan(reason="the case is planned, not run")

    def measure(self, params, ceilings: Ceilings) -> Measurements:
        """Yield the planned peak memory of a rank."""
        plan = self.rank_plan()
        if plan.most is None:
            raise Unsupported(plan.reason or plan.unsupported_reason)
        yield exact(
            "peak_memory",
            plan.most / MIB,
            scope=self.phase,
            method="plan",
            provenance=Provenance.MODELLED,
        )


def cases(params: Params) -> list[Case]:
    """List the cases of decoding, prefill and memory for each number of ranks."""
    device = resolve_device(params.device)
    # A launch on several ranks also times one rank, so one rank has no launch of its own.
    several = [world for world in params.world_sizes if world > 1]
    heads = (params.batch_size, params.num_heads, params.num_kv_heads, params.head_dim)
    phases = [("decode", params.seq_lens, params.algorithms)]
    for phase in ("forward", "training") if params.backward else ("forward",):
        phases.append((phase, params.prefill_seq_lens, params.prefill_algorithms))
    found = []
    for dtype, (phase, lengths, algorithms) in product(params.dtypes, phases):
        names = ("dense", *algorithms) if several else ("dense",)
        for seq_len, world, name in product(lengths, several or [1], names):
            shape = (phase, name, world, seq_len, *heads, dtype, params.threads)
            found.append(ShardedCase(device, *shape, nodes=nodes_of(world)))
    for dtype, name in product(params.dtypes, ("math", "dense", "ring", "ulysses")):
        worlds = [1] if name in WHOLE else several
        for world, seq_len in product(worlds, params.memory_seq_lens):
            shape = ("memory", name, world, seq_len, *heads, dtype, params.threads)
            found.append(MemoryCase(device, *shape))
    return found
