"""Parameters and cases of attention across ranks, and of training steps across ranks."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from nanolib.experiments.distributed import prefill
from nanolib.experiments.distributed.decode import DecodeCase
from nanolib.experiments.distributed.prefill import MemoryCase, PrefillCase
from nanolib.experiments.distributed.training import STRATEGIES, ShardedTrainingCase
from nanolib.experiments.model import cases as models
from nanolib.meters.machine import resolve_device
from nanolib.models.attention.tree import ALGORITHMS
from nanolib.run import params as shared
from nanolib.run.case import Case
from nanolib.run.params import distinct, fitting_config, known_dtypes, known_presets
from nanolib.run.ranks import HANG_S, nodes_of

Lengths = Annotated[list[shared.Length], pydantic.Field(max_length=64)]


class Params(shared.Params):
    """Parameters of the distributed notebook.

    Attributes:
        world_sizes: How many ranks.
        seq_lens: Lengths of the sharded cache to decode over, tokens; empty for none.
        algorithms: `three_allreduce`, `fused`, `gather`, `ring`, `pass_q`.
        q_len: New tokens per sequence.
        prefill_seq_lens: Lengths of sequences to attend to as a whole; empty for none.
        prefill_algorithms: `ring`, `zigzag`, `ulysses`.
        backward: Whether prefill is differentiated, too.
        memory_seq_lens: Lengths whose peak memory is planned; empty for none.
        memory_measured_up_to: The longest whose memory is measured too, on one rank.
        batch_size: Sequences.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of a head.
        dtypes: Types of q, k and v.
        training_preset: Whose training step is measured; a name in `nanolib.PRESETS`, or empty for none.
        overrides: Fields of `NanoConfig` that differ from the preset.
        strategies: `ddp`, `fsdp`.
        train_seq_len: Tokens per sequence of training.
        train_batch_size: Its sequences on each rank.
        threads: Of each rank, on a CPU.
        extrapolate_to_ranks: Ranks to which the cost model is carried on.
        rank_timeout_s: A rank that lets others wait longer has hung, s.
        private_network: Whether ranks get a network of their own where the system allows it, so that
            their bytes can be counted.
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
        "strategies",
        "device",
        "budget_s",
        "label",
    )

    world_sizes: list[pydantic.conint(gt=0, le=1024)] = pydantic.Field(
        [1, 2], min_length=1, max_length=64
    )  # type: ignore[valid-type]
    seq_lens: Lengths = pydantic.Field([2048])
    algorithms: list[Literal[ALGORITHMS]] = pydantic.Field(
        ["three_allreduce", "fused", "gather"], min_length=1
    )  # type: ignore[valid-type]
    q_len: int = pydantic.Field(1, gt=0, le=65_536)
    prefill_seq_lens: Lengths = pydantic.Field([256])
    prefill_algorithms: list[Literal[prefill.ALGORITHMS]] = pydantic.Field(
        ["ring", "zigzag"], min_length=1
    )  # type: ignore[valid-type]
    backward: bool = False
    memory_seq_lens: Lengths = pydantic.Field([256, 65536, 1048576])
    memory_measured_up_to: int = pydantic.Field(256, ge=0, le=shared.MAX_SEQ_LEN)
    batch_size: int = pydantic.Field(1, gt=0, le=65_536)
    num_heads: int = pydantic.Field(8, gt=0, le=4096)
    num_kv_heads: int = pydantic.Field(2, gt=0, le=4096)
    head_dim: int = pydantic.Field(32, gt=0, le=4096)
    dtypes: list[str] = pydantic.Field(["float32"], min_length=1)
    training_preset: str = "decoder_tiny"
    overrides: dict[str, Any] = pydantic.Field(
        {"num_layers": 2, "d_model": 64, "num_heads": 2, "vocab_size": 512}
    )
    strategies: list[Literal[STRATEGIES]] = pydantic.Field(["ddp", "fsdp"], min_length=1)  # type: ignore[valid-type]
    train_seq_len: int = pydantic.Field(64, gt=0, le=shared.MAX_SEQ_LEN)
    train_batch_size: int = pydantic.Field(1, gt=0, le=65_536)
    threads: int = pydantic.Field(1, gt=0, le=4096)
    extrapolate_to_ranks: list[pydantic.conint(gt=0, le=65_536)] = pydantic.Field(
        [4, 8, 16], max_length=64
    )  # type: ignore[valid-type]
    rank_timeout_s: float = pydantic.Field(HANG_S, gt=0, le=86_400)
    private_network: bool = True
    grids: ClassVar = tuple(
        ("world_sizes", "dtypes", lengths)
        for lengths in ("seq_lens", "prefill_seq_lens", "memory_seq_lens")
    )

    _dtypes = pydantic.field_validator("dtypes")(known_dtypes)
    _preset = pydantic.field_validator("training_preset")(
        lambda name: name and known_presets([name])[0]
    )
    _distinct = pydantic.field_validator("*")(
        lambda value: distinct(value) if isinstance(value, list) else value
    )

    @pydantic.field_validator("trace")
    @classmethod
    def _ranks_are_not_traced(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "ranks are processes of their own, whose calls are not traced; leave it out"
            )
        return value

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Params:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}; "
                "choose a divisor"
            )
        if self.seq_lens and self.q_len > min(self.seq_lens):
            raise ValueError(
                f"q_len: {self.q_len} new tokens do not fit into a sequence of "
                f"{min(self.seq_lens)}; give fewer"
            )
        is_ulysses = self.prefill_seq_lens and prefill.ULYSSES in self.prefill_algorithms
        for world in self.world_sizes if is_ulysses else ():
            heads, kv_heads = self.num_heads, self.num_kv_heads
            if heads % world or (kv_heads % world and world % kv_heads):
                raise ValueError(
                    f"world_sizes: {heads} and {kv_heads} heads do not share out over {world} ranks, "
                    "as ulysses needs; choose a divisor of the heads, or leave ulysses out"
                )
        return self

    @pydantic.model_validator(mode="after")
    def _model_fits(self) -> Params:
        if not self.training_preset:
            if self.overrides and self.overrides != type(self).model_fields["overrides"].default:
                raise ValueError(
                    "overrides: there is no preset to change; set training_preset, or leave them out"
                )
            return self
        fitting_config(
            self.training_preset, self.overrides, longest=("train_seq_len", self.train_seq_len)
        )
        return self


def cases(params: Params) -> list[Case]:
    """List decoding, prefill, memory and training by the number of ranks."""
    found: list[Case] = []
    device = resolve_device(params.device)
    several = [world for world in params.world_sizes if world > 1]
    for dtype in params.dtypes:
        names = ("batch_size", "num_heads", "num_kv_heads", "head_dim")
        shape = {name: getattr(params, name) for name in names} | {"dtype": dtype}
        for seq_len, world in itertools.product(params.seq_lens, params.world_sizes):
            of = {"algorithms": tuple(params.algorithms), "q_len": params.q_len, "seq_len": seq_len}
            found.append(DecodeCase(**_on_ranks(params, world), **shape, **of))
        # One rank is measured in the same launch as several, interleaved.
        for seq_len, world in itertools.product(params.prefill_seq_lens, several or [1]):
            algorithms = (prefill.DENSE, *(params.prefill_algorithms if world > 1 else ()))
            of = {"prefill_algorithms": algorithms, "backward": params.backward, "seq_len": seq_len}
            found.append(PrefillCase(**_on_ranks(params, world), **shape, **of))
        for algorithm in prefill.MEMORY_ALGORITHMS:
            for world in several if algorithm in prefill.ALGORITHMS else [1]:
                has_heads = not (params.num_heads % world or params.num_kv_heads % world)
                if algorithm == prefill.ULYSSES and not has_heads:
                    continue
                for seq_len in params.memory_seq_lens:
                    of = {"memory_algorithm": algorithm, "world_size": world, "seq_len": seq_len}
                    measured = seq_len <= params.memory_measured_up_to
                    found.append(MemoryCase(device, **shape, **of, measured=measured))
    for world in (several or [1]) if params.training_preset else ():
        found.append(
            ShardedTrainingCase(
                **_on_ranks(params, world),
                name=models.model_name(params.training_preset, params.overrides),
                preset=params.training_preset,
                overrides=params.overrides,
                strategies=tuple(params.strategies),
                seq_len=params.train_seq_len,
                batch_size=params.train_batch_size,
            )
        )
    return found


def _on_ranks(params: Params, world: int) -> dict[str, Any]:
    return {
        "device": resolve_device(params.device),
        "world_size": world,
        "threads": params.threads,
        "nodes": nodes_of(world),
    }
