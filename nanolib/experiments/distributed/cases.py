"""Define the parameters and the cases of the distributed notebook."""

from itertools import product
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from nanolib.experiments.distributed.case import (
    DECODE,
    DENSE,
    FORWARD,
    MATH,
    MEMORY,
    PREFILL_ALGORITHMS,
    RING,
    TRAINING,
    ULYSSES,
    WHOLE,
    MemoryCase,
    ShardedCase,
)
from nanolib.meters.machine import resolve_device
from nanolib.models.attention.tree import ALGORITHMS
from nanolib.run import params as shared
from nanolib.run.case import Case
from nanolib.run.params import Batch, Count, Dtypes, Grid, Length
from nanolib.run.ranks import HANG_S, nodes_of

MEMORY_ALGORITHMS = (MATH, DENSE, RING, ULYSSES)


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

    NAME: ClassVar[str] = "distributed"
    MAIN: ClassVar = (
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

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            raise ValueError(
                f"num_kv_heads: {kv_heads} does not divide num_heads {heads}; choose a divisor"
            )
        is_ulysses = self.prefill_seq_lens and ULYSSES in self.prefill_algorithms
        for world in self.world_sizes if is_ulysses else ():
            if not _can_split(heads, kv_heads, world):
                raise ValueError(
                    f"world_sizes: ulysses cannot split {heads} query heads and {kv_heads} key "
                    f"heads over {world} ranks; choose a divisor of both, or leave ulysses out"
                )
        return self


def _can_split(heads: int, kv_heads: int, ranks: int) -> bool:
    """Return whether ulysses can give each rank the same number of heads."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def cases(params: Params) -> list[Case]:
    """List the cases of decoding, prefill and memory for each number of ranks."""
    device = resolve_device(params.device)
    # A launch on several ranks also times one rank, so one rank has no launch of its own.
    several = [world for world in params.world_sizes if world > 1]
    shape = {"device": device, "threads": params.threads}
    for name in ("batch_size", "num_heads", "num_kv_heads", "head_dim"):
        shape[name] = getattr(params, name)
    phases = [(DECODE, params.seq_lens, params.algorithms)]
    for phase in (FORWARD, TRAINING) if params.backward else (FORWARD,):
        phases.append((phase, params.prefill_seq_lens, params.prefill_algorithms))
    found = []
    for dtype, (phase, lengths, algorithms) in product(params.dtypes, phases):
        for seq_len, world in product(lengths, several or [1]):
            for algorithm in (DENSE, *algorithms) if several else (DENSE,):
                own = {"phase": phase, "algorithm": algorithm, "dtype": dtype}
                own |= {"seq_len": seq_len, "world_size": world, "nodes": nodes_of(world)}
                found.append(ShardedCase(**shape | own))
    for dtype, algorithm in product(params.dtypes, MEMORY_ALGORITHMS):
        for world in [1] if algorithm in WHOLE else several:
            if algorithm != ULYSSES or _can_split(params.num_heads, params.num_kv_heads, world):
                own = {"phase": MEMORY, "algorithm": algorithm, "dtype": dtype}
                own |= shape | {"world_size": world}
                found += [MemoryCase(**own, seq_len=n) for n in params.memory_seq_lens]
    return found
