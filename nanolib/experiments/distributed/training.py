"""Training steps over ranks: each alone, with gradients averaged (DDP), with weights sharded (FSDP), interleaved in one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanolib.config import NanoConfig
from nanolib.experiments.distributed.rank_rows import latency_row, rounds_of, slowest, speed_up_rows
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.steps import Training
from nanolib.measurement import Measurement, exact
from nanolib.meters.memory import MIB
from nanolib.meters.time.together import time_together
from nanolib.models import create_model, generate_random_batch
from nanolib.models.attention.traffic import all_gather_bytes, all_reduce_bytes
from nanolib.run.case import Plan
from nanolib.run.ranks import RanksCase, asked_case, measure_on_ranks
from nanolib.stats.intervals import TooFewSamples, median_interval

# The first rank while the others wait; every rank by itself; and together.
ALONE, LOCAL, DDP, FSDP = "alone", "local", "ddp", "fsdp"
STRATEGIES = (DDP, FSDP)


@dataclass(frozen=True)
class ShardedTrainingCase(RanksCase):
    """A step of a model on so many ranks, each with a batch of its own."""

    name: str
    world_size: int
    preset: str
    overrides: dict[str, Any]
    strategies: tuple[str, ...]
    seq_len: int
    batch_size: int
    threads: int

    @property
    def config(self) -> NanoConfig:
        """The model."""
        return NanoConfig.from_preset(self.preset, **self.overrides)

    @property
    def _weight_bytes(self) -> float:
        """Of all weights, as many as of their gradients and of each of the optimizer's states."""
        return float(getattr(torch, self.config.dtype).itemsize * self.config.parameter_count)

    def sent(self, strategy: str) -> float:
        """Bytes that each rank sends in a step: gradients reduced; or weights gathered twice and gradients scattered."""
        weights = self._weight_bytes
        if strategy == DDP:
            return all_reduce_bytes(weights, self.world_size)
        return 3 * all_gather_bytes(weights / self.world_size, self.world_size)

    def __str__(self) -> str:
        """The model, ranks and shape."""
        return f"training {self.name} {self.ranks} n={self.seq_len} batch={self.batch_size} each"

    def plan(self) -> Plan:
        """Of the ranks that share this device: all strategies' models are there at once, one of them in its step.

        Weights and the optimizer's two states stay; beside DDP's lie its gradients. FSDP's are counted whole, which they are for
        one rank alone.
        """
        shape = (
            self.preset,
            self.overrides,
            "dense",
            self.seq_len,
            self.batch_size,
            self.config.dtype,
        )
        one = ModelCase(self.device, self.name, *shape, "training").plan()
        others = self._weight_bytes * (3 * len(self.strategies) + (DDP in self.strategies))
        return Plan(
            {scope: round((peak + others) * self.sharing) for scope, peak in one.peaks.items()},
            one.reason,
        )

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Parameters, and bytes of each strategy."""
        found: dict[str, float | str] = {"parameters": self.config.parameter_count}
        if self.world_size > 1:
            found["bytes sent per rank"] = ", ".join(
                f"{s} {self.sent(s):,.0f}" for s in self.strategies
            )
        return found

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Step time, throughput, bytes by formula, and what of the communication computing does not hide."""
        answers, flags = measure_on_ranks(rank, self, params)
        rounds = rounds_of(answers)
        each = slowest([answer["blocks"][LOCAL] for answer in answers])
        for strategy in (ALONE, LOCAL, *self.strategies):
            tokens = self.batch_size * self.seq_len * (1 if strategy == ALONE else self.world_size)
            blocks = [answer["blocks"][strategy] for answer in answers]
            row = latency_row(blocks, strategy, flags, threads=self.threads)
            yield row
            ends = (None if end is None else tokens / end * 1e3 for end in (row.high, row.low))
            yield Measurement(
                "tokens_per_second",
                tokens / row.estimate * 1e3,
                *ends,
                row.confidence,
                row.n,
                method=row.method,
                scope=strategy,
                flags=row.flags,
            )
            if strategy in (ALONE, LOCAL) or self.world_size == 1:
                continue
            yield from speed_up_rows(rounds, strategy, [ALONE], flags)
            yield exact("wire_bytes", self.sent(strategy), scope=strategy)
            yield exact(
                "footprint",
                answers[0]["weights"][strategy] / MIB,
                scope=strategy,
                method="live_tensor_bytes",
            )
            extra = slowest(blocks) - each
            with contextlib.suppress(TooFewSamples):
                low, exposed, high = median_interval(extra)
                shared = {
                    "confidence": 0.95,
                    "n": len(extra),
                    "method": "less the same step by itself, paired",
                    "scope": strategy,
                }
                details = {"share_of_step": exposed / row.estimate}
                yield Measurement(
                    "exposed_communication",
                    exposed,
                    low,
                    high,
                    flags=flags,
                    details=details,
                    **shared,
                )


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures; see the case's `measure`."""
    case, seed, budget_s, device = asked_case(ShardedTrainingCase, asked)
    steps: dict[str, Callable[[], object]] = {}
    weights = {}
    for strategy in (LOCAL, *case.strategies):
        torch.manual_seed(seed)
        model = wrap(strategy, create_model(case.config, device))
        torch.manual_seed(seed + 1 + dist.get_rank())  # ranks train on text of their own
        ids = generate_random_batch(
            case.batch_size, case.seq_len + 1, case.config.vocab_size, device
        )
        steps[strategy] = Training(model, ids, "eager", 1e-3)
        weights[strategy] = sum(local(p).untyped_storage().nbytes() for p in model.parameters())
    first = dist.get_rank() == 0
    steps[ALONE] = lambda: steps[LOCAL]() if first else None
    blocks = time_together(steps, budget_s, device=device, seed=seed)
    return {"blocks": blocks.ms, "busy": blocks.is_busy, "weights": weights}


def wrap(strategy: str, model: nn.Module) -> nn.Module:
    """The model as its ranks train it together; `local` leaves it alone."""
    if strategy == DDP:
        return nn.parallel.DistributedDataParallel(model)
    if strategy == FSDP:
        from torch.distributed.fsdp import fully_shard

        for blocks in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block)
        fully_shard(model)
    return model


def local(parameter: torch.Tensor) -> torch.Tensor:
    """What of a parameter is on this rank."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
