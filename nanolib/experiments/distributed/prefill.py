"""Measure attention over a whole sequence that is sharded across ranks, and plan the memory."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nanolib.experiments.distributed.decode import SequenceCase, random_heads
from nanolib.experiments.distributed.launch import Launch, predict_traffic, time_calls
from nanolib.measurement import Measurements, Provenance, exact
from nanolib.meters.links import count_bytes
from nanolib.meters.memory import MIB, peak_memory
from nanolib.models import attention
from nanolib.models.attention.ranks import Sharding, Traffic, traffic_of
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.ring import ring_attention
from nanolib.models.attention.ulysses import ulysses_attention
from nanolib.run.case import Case, Ceilings, Plan, Predicted, asked_case, measure_on_ranks
from nanolib.run.memory_plan import Workload, planned, shortage
from nanolib.run.ranks import lacking

RING, ZIGZAG, ULYSSES, DENSE = "ring", "zigzag", "ulysses", "dense"
ALGORITHMS = (RING, ZIGZAG, ULYSSES)
MEMORY_ALGORITHMS = ("math", "flash", RING, ULYSSES)
# The float64 reference stores all scores, so nanolib checks at most this many scores per rank.
_CHECKED_SCORES = 2**25


@dataclass(frozen=True)
class PrefillCase(SequenceCase):
    """Case that computes causal attention over a sharded sequence, with several algorithms.

    `dense` is the baseline: the first rank attends to the whole sequence while the other ranks
    wait.
    """

    prefill_algorithms: tuple[str, ...]
    backward: bool

    @property
    def directions(self) -> tuple[str, ...]:
        """Names of the timed passes."""
        return ("forward", "training") if self.backward else ("forward",)

    def layout(self, algorithm: str) -> Sharding:
        """Return the positions of the tokens on each rank, for an algorithm."""
        if algorithm == DENSE:
            return Sharding.from_lengths([self.seq_len] + [0] * (self.world_size - 1))
        split = Sharding.zigzag if algorithm == ZIGZAG else Sharding.contiguous
        return split(self.seq_len, self.world_size)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Communication of one forward pass, by algorithm."""
        return {
            algorithm: traffic_of(algorithm, self.layout(algorithm), **self.shape)
            for algorithm in self.prefill_algorithms
            if algorithm != DENSE
        }

    def plan(self) -> Plan:
        """Plan the peak memory of all ranks that share this device."""
        one = self.rank_plan()
        return Plan({scope: peak * self.sharing for scope, peak in one.peaks.items()}, one.reason)

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the communication steps, sent bytes and peak memory of each algorithm."""
        peaks = self.rank_plan().peaks
        planned = {name: peaks[f"{name} forward"] / MIB for name in self.prefill_algorithms}
        return {"peak_memory": planned} | predict_traffic(self.traffic)

    def rank_plan(self) -> Plan:
        """Plan the peak memory of the first rank for each scope. Other ranks are simulated."""

        def workloads() -> Iterator[Workload]:
            for algorithm in self.prefill_algorithms:
                share = _Share(self, algorithm, 0, 0, torch.device(self.device))
                for scope, call in share.calls().items():
                    yield Workload(scope, call, lambda share=share: share.tensors)

        with _pretended_ranks(self.world_size):
            return planned(self, workloads)

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the time, traffic, error and peak memory of each algorithm."""
        plans = self.rank_plan().peaks
        launch = Launch(*measure_on_ranks(rank, self, params))
        for algorithm in self.prefill_algorithms:
            for direction in self.directions:
                scope = f"{algorithm} {direction}"
                yield launch.latency(scope)
                peaks = [answer["peaks"][scope] for answer in launch.answers]
                method = f"{launch.answers[0]['peak method']}, largest rank"
                plan = plans[scope] / MIB if scope in plans else None
                peak = max(peaks) / MIB
                yield exact("peak_memory", peak, scope=scope, method=method, predicted=plan)
                others = [f"{other} {direction}" for other in self.prefill_algorithms]
                yield from launch.speed_ups(scope, others)
            yield from launch.algorithm(algorithm, self.traffic.get(algorithm))


@dataclass(frozen=True)
class MemoryCase(Case):
    """Case that plans the peak memory of attention, or measures it on one rank."""

    supports_ab: ClassVar[bool] = False

    world_size: int
    seq_len: int
    memory_algorithm: str
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    measured: bool

    def __str__(self) -> str:
        return f"memory {self.memory_algorithm} {self.world_size} rank(s) n={self.seq_len}"

    def unsupported(self) -> str:
        """Return why this machine cannot run the case."""
        return lacking(self.device, 1)

    @property
    def _is_run(self) -> bool:
        is_asked = self.measured and self.world_size == 1
        return is_asked and not shortage(self._rank_plan(), self.device)

    def plan(self) -> Plan:
        """Return the planned peak memory if the case runs. Other cases allocate no memory."""
        return self._rank_plan() if self._is_run else Plan(reason="the case is planned, not run")

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the planned peak memory of one rank, in MiB."""
        most = self._rank_plan().most
        return {} if most is None else {"peak_memory": most / MIB}

    def _rank_plan(self) -> Plan:
        if self.memory_algorithm not in ALGORITHMS:
            return planned(self, lambda: [self._dense()])
        shape = self.factors
        del shape["measured"]
        shape |= {"prefill_algorithms": (shape.pop("memory_algorithm"),), "backward": False}
        return PrefillCase(**shape, threads=1).rank_plan()

    def _dense(self) -> Workload:
        generator = torch.Generator(self.device)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        tensors = [random_heads(self, generator, count, self.seq_len) for count in heads]
        options = {"backend": self.memory_algorithm}

        @torch.no_grad()
        def call() -> torch.Tensor:
            return attention.attend("dense", *tensors, causal=True, options=options)

        return Workload(f"{self.memory_algorithm} forward", call, lambda: tensors)

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Yield `peak_memory`: measured if the case runs on one rank, otherwise planned."""
        scope, predicted = f"{self.memory_algorithm} forward", self.predict().get("peak_memory")
        if self._is_run:
            work = self._dense()
            work.call()
            with peak_memory(self.device, *work.existing()) as peak:
                work.call()
            how = {"method": peak.method, "predicted": predicted}
            yield exact("peak_memory", peak.own / MIB, scope=scope, **how)
        elif predicted is not None:
            how = {"method": "plan", "provenance": Provenance.MODELLED}
            yield exact("peak_memory", predicted, scope=scope, **how)


@contextlib.contextmanager
def _pretended_ranks(world_size: int) -> Iterator[None]:
    """Create a process group whose collectives do nothing, because fake tensors have no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch replaces this hook and never restores the original.
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """Time the algorithms on this rank, and return the times, peaks, errors and sent bytes."""
    case, seed, budget_s, device = asked_case(PrefillCase, asked)
    scores = case.seq_len**2 * case.batch_size * case.num_heads
    is_checked = scores <= _CHECKED_SCORES * case.world_size
    calls, parts, peaks, errors, counted = {}, {}, {}, {}, {}
    for algorithm in case.prefill_algorithms:
        share = _Share(case, algorithm, dist.get_rank(), seed, device)
        for scope, call in share.calls().items():
            call()
            with peak_memory(device, *share.tensors) as peak:
                call()
            calls[scope], peaks[scope] = call, peak.own
        parts[algorithm] = share.in_parts
        if is_checked:
            errors[algorithm] = share.error()
        if algorithm in case.traffic:
            counted[algorithm] = count_bytes(calls[f"{algorithm} forward"], calls=2)
    answer = time_calls(calls, parts, budget_s=budget_s, device=device, seed=seed)
    found = {"peaks": peaks, "peak method": peak.method, "errors": errors, "bytes": counted}
    return answer | found


class _Share:
    """One rank's part of the sequence, with the calls of one algorithm on this part.

    Attributes:
        tensors: q, k, v and a gradient of the output, shape [batch, heads, local_len, head_dim].
    """

    def __init__(
        self, case: PrefillCase, algorithm: str, rank: int, seed: int, device: torch.device
    ) -> None:
        self._case, self._algorithm, self._rank = case, algorithm, rank
        self._seed, self._device = seed, device
        self._layout = case.layout(algorithm)
        self.tensors = [self._layout.take(x, rank).clone() for x in self._whole()]
        for x in self.tensors[:3]:
            x.requires_grad_(case.backward)

    def _whole(self) -> Iterator[torch.Tensor]:
        """Return the tensors of the whole sequence, which are the same on every rank."""
        case, generator = self._case, torch.Generator(self._device).manual_seed(self._seed)
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
        return (random_heads(case, generator, count, case.seq_len) for count in heads)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the calls by scope: the forward pass and, if requested, the training pass."""
        calls = {"forward": torch.no_grad()(self._attend), "training": self._train}
        return {f"{self._algorithm} {name}": calls[name] for name in self._case.directions}

    def _attend(self, **more: Any) -> torch.Tensor:
        q, k, v, _ = self.tensors
        if self._algorithm == DENSE:  # Only the first rank has tokens.
            return attention.attend("dense", q, k, v, causal=True) if q.numel() else q
        attend = ulysses_attention if self._algorithm == ULYSSES else ring_attention
        return attend(q, k, v, layout=self._layout, **more)

    def _train(self) -> Any:
        *inputs, grad = self.tensors
        return torch.autograd.grad(self._attend(), inputs, grad, allow_unused=True)

    @torch.no_grad()
    def in_parts(self, timer: Any) -> None:
        """Run the parts one after the other, because overlapping parts have no separate times."""
        if self._algorithm == DENSE:
            with timer.time_block("comp_attention"):
                self._attend()
        else:
            more = {} if self._algorithm == ULYSSES else {"overlap": False}
            self._attend(timer=timer, **more)

    @torch.no_grad()
    def error(self) -> float:
        """Return the relative error of this rank's output against float64."""
        out = self._attend()
        if not out.numel():
            return 0.0
        _, keys, values, _ = self._whole()
        n = self._case.seq_len
        mask = self._layout.take(causal_mask(n, n, self._device), self._rank, dim=0)
        return relative_error(out, masked_attention(self.tensors[0], keys, values, mask))
