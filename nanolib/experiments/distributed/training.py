"""Training steps over ranks, in one launch: one rank, each rank by itself, DDP and FSDP."""

from __future__ import annotations

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
from nanolib.stats.intervals import median_interval

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
        """Bytes of all weights; gradients and each of the optimizer's states take as many."""
        return float(getattr(torch, self.config.dtype).itemsize * self.config.parameter_count)

    def sent(self, strategy: str) -> float:
        """Bytes that each rank sends in a step.

        DDP reduces gradients; FSDP gathers weights twice and scatters gradients.
        """
        weights = self._weight_bytes
        if strategy == DDP:
            return all_reduce_bytes(weights, self.world_size)
        return 3 * all_gather_bytes(weights / self.world_size, self.world_size)

    def __str__(self) -> str:
        """The model, ranks and shape."""
        return f"training {self.name} {self.ranks} n={self.seq_len} batch={self.batch_size} each"

    def plan(self) -> Plan:
        """The peak of the ranks that share this device: all strategies' models, one in its step.

        Weights and the optimizer's two states stay; DDP keeps its gradients too. FSDP's are counted
        whole, which they are for one rank.
        """
        shape = ("dense", self.seq_len, self.batch_size, self.config.dtype, "training")
        one = ModelCase(self.device, self.name, self.preset, self.overrides, *shape).plan()
        others = self._weight_bytes * (3 * len(self.strategies) + (DDP in self.strategies))
        peaks = {scope: round((peak + others) * self.sharing) for scope, peak in one.peaks.items()}
        return Plan(peaks, one.reason)

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Parameters, and bytes of each strategy."""
        sent = ", ".join(f"{each} {self.sent(each):,.0f}" for each in self.strategies)
        several = {"bytes sent per rank": sent} if self.world_size > 1 else {}
        return {"parameters": self.config.parameter_count} | several

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Measure step time, throughput and exposed communication; give bytes by formula."""
        answers, flags = measure_on_ranks(rank, self, params)
        rounds = rounds_of(answers)
        times = {
            name: [answer["blocks"][name] for answer in answers]
            for name in (ALONE, LOCAL, *self.strategies)
        }
        for strategy, blocks in times.items():
            ranks = 1 if strategy == ALONE else self.world_size
            tokens = 1e3 * self.batch_size * self.seq_len * ranks
            row = latency_row(blocks, strategy, flags, threads=self.threads)
            yield row
            rates = (ms and tokens / ms for ms in (row.estimate, row.high, row.low))
            more = {"method": row.method, "scope": strategy, "flags": row.flags}
            yield Measurement("tokens_per_second", *rates, row.confidence, row.n, **more)
            if strategy in (ALONE, LOCAL) or self.world_size == 1:
                continue
            yield from speed_up_rows(rounds, strategy, [ALONE], flags)
            yield exact("wire_bytes", self.sent(strategy), scope=strategy)
            weights = answers[0]["weights"][strategy] / MIB
            yield exact("footprint", weights, scope=strategy, method="live_tensor_bytes")
            extra = slowest(blocks) - slowest(times[LOCAL])
            low, exposed, high = median_interval(extra)
            more = {"method": "less the same step by itself, paired", "scope": strategy}
            more |= {"flags": flags, "details": {"share_of_step": exposed / row.estimate}}
            values = (exposed, low, high, 0.95, len(extra))
            yield Measurement("exposed_communication", *values, **more)


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure on one rank; see the case's `measure`."""
    case, seed, budget_s, device = asked_case(ShardedTrainingCase, asked)
    steps: dict[str, Callable[[], object]] = {}
    weights = {}
    for strategy in (LOCAL, *case.strategies):
        torch.manual_seed(seed)
        model = _wrap(strategy, create_model(case.config, device))
        torch.manual_seed(seed + 1 + dist.get_rank())  # ranks train on text of their own
        ids = generate_random_batch(
            case.batch_size, case.seq_len + 1, case.config.vocab_size, device
        )
        steps[strategy] = Training(model, ids, "eager", 1e-3)
        local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
        weights[strategy] = sum(part.untyped_storage().nbytes() for part in local)
    first = dist.get_rank() == 0
    steps[ALONE] = lambda: steps[LOCAL]() if first else None
    blocks = time_together(steps, budget_s, device=device, seed=seed)
    return {"blocks": blocks.ms, "busy": blocks.is_busy, "weights": weights}


def _wrap(strategy: str, model: nn.Module) -> nn.Module:
    """Wrap the model as its ranks train it together; `local` leaves it as it is."""
    if strategy == DDP:
        return nn.parallel.DistributedDataParallel(model)
    if strategy == FSDP:
        from torch.distributed.fsdp import fully_shard

        for blocks in [part for part in model.modules() if isinstance(part, nn.ModuleList)]:
            for block in blocks:
                fully_shard(block)
        fully_shard(model)
    return model
