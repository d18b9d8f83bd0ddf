"""Attention over a whole sequence that is sharded across ranks: time, parts, bytes and memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nanolib.experiments.distributed.decode import SequenceCase
from nanolib.experiments.distributed.rank_rows import (
    algorithm_rows,
    latency_row,
    rounds_of,
    speed_up_rows,
    traffic_words,
)
from nanolib.measurement import Measurement, Provenance, exact
from nanolib.meters.links import count_bytes
from nanolib.meters.memory import MIB, peak_memory
from nanolib.meters.time.together import parts_together, time_together
from nanolib.models import attention
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.ring import ring_attention
from nanolib.models.attention.sharding import Sharding
from nanolib.models.attention.traffic import Traffic, prefill_traffic
from nanolib.models.attention.ulysses import ulysses_attention
from nanolib.run.case import Case, Plan
from nanolib.run.memory_plan import Workload, planned, shortage
from nanolib.run.ranks import asked_case, lacking, measure_on_ranks

RING, ZIGZAG, ULYSSES, DENSE = "ring", "zigzag", "ulysses", "dense"
ALGORITHMS = (RING, ZIGZAG, ULYSSES)
MEMORY_ALGORITHMS = ("math", "flash", RING, ULYSSES)
_CHECKED_SCORES = 2**25  # float64 scores up to which a rank compares its part


@dataclass(frozen=True)
class PrefillCase(SequenceCase):
    """Causal attention over a sequence, by every algorithm.

    `dense` is the baseline: the first rank attends to the whole sequence while the others wait.
    """

    prefill_forms: tuple[str, ...]
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    backward: bool
    threads: int

    @property
    def directions(self) -> tuple[str, ...]:
        """What is timed of each algorithm."""
        return ("forward", "training") if self.backward else ("forward",)

    def layout(self, form: str) -> Sharding:
        """Which positions each rank holds."""
        if form == DENSE:
            return Sharding.from_lengths([self.seq_len] + [0] * (self.world_size - 1))
        return (Sharding.zigzag if form == ZIGZAG else Sharding.contiguous)(
            self.seq_len, self.world_size
        )

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What a forward pass of each algorithm sends."""
        forms = self.prefill_forms if self.world_size > 1 else ()
        return {
            form: prefill_traffic(form, self.layout(form), **self.shape)
            for form in forms
            if form != DENSE
        }

    def plan(self) -> Plan:
        """The peak memory of the ranks that share this device."""
        one = self.rank_plan()
        return Plan({scope: peak * self.sharing for scope, peak in one.peaks.items()}, one.reason)

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Rounds, bytes and memory of each algorithm."""
        peaks = self.rank_plan().peaks
        words = (f"{form} {peaks[f'{form} forward'] / MIB:.4g} MiB" for form in self.prefill_forms)
        found: dict[str, float | str] = {"peak memory per rank": ", ".join(words)}
        return found | (traffic_words(self.traffic) if self.traffic else {})

    def rank_plan(self) -> Plan:
        """Peak memory of one rank for each scope; the other ranks are simulated."""

        def workloads() -> Iterator[Workload]:
            for form in self.prefill_forms:
                tensors = _shard(self, form, 0, 0, torch.device(self.device))
                for scope, call in _calls(self, form, tensors).items():
                    yield Workload(scope, call, lambda held=tensors: held)

        with _pretended_ranks(self.world_size):
            return planned(self, workloads)

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Measure times, parts, bytes, errors, and memory next to its plan."""
        plan = self.rank_plan()
        answers, flags = measure_on_ranks(
            rank, self, params, private_network=params.private_network
        )
        rounds = rounds_of(answers)
        for form in self.prefill_forms:
            for direction in self.directions:
                scope = f"{form} {direction}"
                blocks = [answer["blocks"][scope] for answer in answers]
                yield latency_row(blocks, scope, flags, threads=self.threads)
                yield exact(
                    "peak_memory",
                    max(answer["peaks"][scope] for answer in answers) / MIB,
                    scope=scope,
                    method=f"{answers[0]['peak method']}, largest rank",
                    predicted=plan.peaks[scope] / MIB if scope in plan.peaks else None,
                )
                others = [f"{other} {direction}" for other in self.prefill_forms]
                yield from speed_up_rows(rounds, scope, others, flags)
            yield from algorithm_rows(answers, form, flags, self.traffic.get(form))


@dataclass(frozen=True)
class MemoryCase(Case):
    """The peak memory of attention over a sequence: planned, or measured on one rank."""

    interleaves: ClassVar[bool] = False

    world_size: int
    seq_len: int
    memory_form: str
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    measured: bool

    def __str__(self) -> str:
        """Algorithm, ranks and length."""
        return f"memory {self.memory_form} {self.world_size} rank(s) n={self.seq_len}"

    def unsupported(self) -> str:
        """Why this machine cannot run it."""
        return lacking(self.device, 1)

    @property
    def _is_run(self) -> bool:
        is_asked = self.measured and self.world_size == 1
        return is_asked and not shortage(self._rank_plan(), self.device)

    def plan(self) -> Plan:
        """What running it needs; most are only planned."""
        return self._rank_plan() if self._is_run else Plan(reason="planned, and not run")

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """The peak memory of one rank, MiB."""
        most = self._rank_plan().most
        return {} if most is None else {"peak_memory": most / MIB}

    def _rank_plan(self) -> Plan:
        """The peak of a forward pass on one rank."""
        if self.memory_form not in ALGORITHMS:
            return planned(self, lambda: [self._dense_workload()])
        names = ("device", "world_size", "seq_len", "batch_size", "num_heads", "num_kv_heads")
        shape = {name: getattr(self, name) for name in (*names, "head_dim", "dtype")}
        forms = (self.memory_form,)
        return PrefillCase(**shape, threads=1, prefill_forms=forms, backward=False).rank_plan()

    def _dense_workload(self) -> Workload:
        dtype = getattr(torch, self.dtype)
        tensors = [
            torch.randn(
                self.batch_size, heads, self.seq_len, self.head_dim, dtype=dtype, device=self.device
            )
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        ]
        options = {"backend": self.memory_form}

        @torch.no_grad()
        def call() -> torch.Tensor:
            return attention.attend("dense", *tensors, causal=True, options=options)

        return Workload(f"{self.memory_form} forward", call, lambda: tensors)

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Measure `peak_memory` if requested, on one rank and if it fits; otherwise plan it."""
        scope, most = f"{self.memory_form} forward", self._rank_plan().most
        predicted = None if most is None else most / MIB
        if self._is_run:
            work = self._dense_workload()
            work.call()
            with peak_memory(self.device, *work.existing()) as peak:
                work.call()
            found, how = peak.own / MIB, {"method": peak.method, "predicted": predicted}
            yield exact("peak_memory", found, scope=scope, **how)
        elif predicted is not None:
            how = {"method": "plan", "provenance": Provenance.MODELLED}
            yield exact("peak_memory", predicted, scope=scope, **how)


@contextlib.contextmanager
def _pretended_ranks(world_size: int) -> Iterator[None]:
    """Make a process group whose collectives do nothing: enough for tensors that have no data."""
    if world_size == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    excepthook = sys.excepthook  # torch puts one there that names a rank, and leaves it
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


# On the ranks


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure on one rank; see the case's `measure`."""
    case, seed, budget_s, device = asked_case(PrefillCase, asked)
    me = dist.get_rank()
    calls: dict[str, Callable[[], object]] = {}
    timed: dict[str, Callable[[Any], object]] = {}
    peaks, errors, counted = {}, {}, {}
    scores = case.seq_len**2 * case.batch_size * case.num_heads
    for form in case.prefill_forms:
        tensors = _shard(case, form, me, seed, device)
        mine = _calls(case, form, tensors)
        calls |= mine
        for scope, call in mine.items():
            call()
            with peak_memory(device, *tensors) as peak:
                call()
            peaks[scope] = peak.own
        timed[form] = _timed(case, form, tensors)
        if scores <= _CHECKED_SCORES * case.world_size:
            errors[form] = _error(case, form, tensors, me, seed, device)
        if form in case.traffic:
            counted[form] = count_bytes(mine[f"{form} forward"], calls=2)
    blocks = time_together(calls, budget_s, device=device, seed=seed)
    return {
        "blocks": blocks.ms,
        "busy": blocks.is_busy,
        "parts": parts_together(timed, budget_s, device=device),
        "errors": errors,
        "bytes": counted,
        "peaks": peaks,
        "peak method": peak.method,
    }


def _attend(case: PrefillCase, form: str, q: Any, k: Any, v: Any, **more: Any) -> torch.Tensor:
    if form == DENSE:  # nothing on all ranks but the first
        return attention.attend("dense", q, k, v, causal=True) if q.numel() else q
    attend = ulysses_attention if form == ULYSSES else ring_attention
    return attend(q, k, v, layout=case.layout(form), **more)


def _calls(
    case: PrefillCase, form: str, tensors: tuple[torch.Tensor, ...]
) -> dict[str, Callable[[], object]]:
    """Scope → call: without gradients, and with them."""
    q, k, v, grad = tensors

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return _attend(case, form, q, k, v)

    def training() -> Any:
        if form == DENSE and not q.numel():
            return None
        return torch.autograd.grad(_attend(case, form, q, k, v), (q, k, v), grad)

    both = zip(("forward", "training"), (forward, training), strict=True)
    return {f"{form} {name}": call for name, call in both if name in case.directions}


def _timed(
    case: PrefillCase, form: str, tensors: tuple[torch.Tensor, ...]
) -> Callable[[Any], object]:
    """Make a forward pass part by part; hops that overlap with blocks could not be told apart."""
    q, k, v, _ = tensors

    @torch.no_grad()
    def call(timer: Any) -> None:
        if form == DENSE:
            with timer.time_block("comp_attention"):
                _attend(case, form, q, k, v)
        else:
            more = {} if form == ULYSSES else {"overlap": False}
            _attend(case, form, q, k, v, timer=timer, **more)

    return call


def _whole(case: PrefillCase, seed: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Make q, k, v and a gradient of the output of the whole sequence; the same on every rank."""
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, case.dtype)
    for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads):
        shape = (case.batch_size, heads, case.seq_len, case.head_dim)
        yield torch.randn(*shape, generator=generator, dtype=dtype, device=device)


def _shard(
    case: PrefillCase, form: str, me: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    parts = [case.layout(form).take(x, me).clone() for x in _whole(case, seed, device)]
    for x in parts[:3]:
        x.requires_grad_(case.backward)
    return tuple(parts)


@torch.no_grad()
def _error(
    case: PrefillCase, form: str, tensors: tuple[torch.Tensor, ...], me: int, seed: int, device: Any
) -> float:
    """Compare this rank's part with float64."""
    q, k, v, _ = tensors
    out = _attend(case, form, q, k, v)
    if not out.numel():
        return 0.0
    _, keys, values, _ = _whole(case, seed, device)
    mask = case.layout(form).take(causal_mask(case.seq_len, case.seq_len, device), me, dim=0)
    return relative_error(out, masked_attention(q, keys, values, mask))
