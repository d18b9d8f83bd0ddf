"""Training steps over ranks, in one launch: one rank, each rank by itself, DDP and FSDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanolib.config import NanoConfig
from nanolib.experiments.distributed.launch import Launch, time_calls
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.steps import Training
from nanolib.measurement import Measurement, exact
from nanolib.meters.memory import MIB
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
        launch = Launch(*measure_on_ranks(rank, self, params))
        for strategy in (ALONE, LOCAL, *self.strategies):
            step = launch.latency(strategy, threads=self.threads)
            yield step
            ranks = 1 if strategy == ALONE else self.world_size
            tokens = 1e3 * self.batch_size * self.seq_len * ranks
            rates = (tokens / ms for ms in (step.estimate, step.high, step.low))
            how = {"method": step.method, "scope": strategy, "flags": step.flags}
            yield Measurement("tokens_per_second", *rates, step.confidence, step.n, **how)
            if strategy in self.strategies and self.world_size > 1:
                yield from launch.speed_ups(strategy, [ALONE])
                yield exact("wire_bytes", self.sent(strategy), scope=strategy)
                weights = launch.answers[0]["weights"][strategy] / MIB
                yield exact("weight_memory", weights, scope=strategy, method="live_tensor_bytes")
                yield _exposed(launch, strategy, step.estimate)


def _exposed(launch: Launch, strategy: str, step_ms: float) -> Measurement:
    """Take from a step's time that of the same step without the others, block by block."""
    extra = launch.slowest(strategy) - launch.slowest(LOCAL)
    low, exposed, high = median_interval(extra)
    return Measurement(
        "exposed_communication",
        exposed,
        low,
        high,
        0.95,
        n=len(extra),
        method="less the same step by itself, paired",
        scope=strategy,
        flags=launch.flags,
        details={"share_of_step": exposed / step_ms},
    )


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure on one rank; see the case's `measure`."""
    case, seed, budget_s, device = asked_case(ShardedTrainingCase, asked)
    steps: dict[str, Callable[[], object]] = {}
    weights = {}
    for strategy in (LOCAL, *case.strategies):
        torch.manual_seed(seed)
        model = _wrap(strategy, create_model(case.config, device))
        torch.manual_seed(seed + 1 + dist.get_rank())  # ranks train on text of their own
        shape = (case.batch_size, case.seq_len + 1)
        ids = generate_random_batch(*shape, case.config.vocab_size, device)
        steps[strategy] = Training(model, ids, "eager", 1e-3)
        local = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
        weights[strategy] = sum(part.untyped_storage().nbytes() for part in local)
    first = dist.get_rank() == 0
    steps[ALONE] = lambda: steps[LOCAL]() if first else None
    answer = time_calls(steps, {}, budget_s=budget_s, device=device, seed=seed)
    return answer | {"weights": weights}


def _wrap(strategy: str, model: nn.Module) -> nn.Module:
    """Wrap the model as its ranks train it together; `local` leaves it as it is."""
    if strategy == DDP:
        return nn.parallel.DistributedDataParallel(model)
    if strategy == FSDP:
        from torch.distributed.fsdp import fully_shard

        stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
        for block in [*(block for stack in stacks for block in stack), model]:
            fully_shard(block)
    return model
