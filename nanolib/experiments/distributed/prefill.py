"""Attention over a whole sequence that is sharded across ranks: time, parts, bytes and memory per rank; and how far memory goes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from nanolib.experiments.distributed.rank_rows import (
    bytes_rows,
    latency_row,
    part_rows,
    rounds_of,
    speed_up_rows,
    traffic_words,
)
from nanolib.measurement import Measurement, Provenance, exact
from nanolib.meters.links import count_bytes
from nanolib.meters.memory import MIB, peak_memory
from nanolib.meters.time.together import parts_together, time_together
from nanolib.models import attention
from nanolib.models.attention.layout import Layout
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.ring import ring_attention
from nanolib.models.attention.traffic import Traffic, prefill_traffic
from nanolib.models.attention.ulysses import ulysses_attention
from nanolib.run.case import Case, Plan
from nanolib.run.ranks import RanksCase, asked_case, lacking, measure_on_ranks
from nanolib.run.workload import Workload, planned, shortage

RING, ZIGZAG, ULYSSES, DENSE = "ring", "zigzag", "ulysses", "dense"
ALGORITHMS = (RING, ZIGZAG, ULYSSES)
MEMORY_ALGORITHMS = ("math", "flash", RING, ULYSSES)
_CHECKED_SCORES = 2**25  # float64 scores up to which a rank compares its part


@dataclass(frozen=True)
class PrefillCase(RanksCase):
    """Causal attention over a sequence on so many ranks, in every form.

    `dense` is the baseline: the first rank attends to the whole sequence while the others wait.
    """

    world_size: int
    seq_len: int
    prefill_forms: tuple[str, ...]
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    backward: bool
    threads: int

    @property
    def scopes(self) -> tuple[str, ...]:
        """Forms, each with its direction."""
        directions = ("forward", "training") if self.backward else ("forward",)
        return tuple(
            f"{form} {direction}" for form in self.prefill_forms for direction in directions
        )

    def layout(self, form: str) -> Layout:
        """Which positions each rank holds."""
        if form == DENSE:
            return Layout.of_lengths([self.seq_len] + [0] * (self.world_size - 1))
        return (Layout.zigzag if form == ZIGZAG else Layout.plain)(self.seq_len, self.world_size)

    def traffic(self, form: str) -> Traffic:
        """What a forward pass sends."""
        return prefill_traffic(
            form,
            self.layout(form),
            batch=self.batch_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=getattr(torch, self.dtype).itemsize,
        )

    def __str__(self) -> str:
        """Ranks, length and type."""
        return f"prefill {self.ranks} n={self.seq_len} batch={self.batch_size} {self.dtype}"

    def plan(self) -> Plan:
        """The peak memory of the ranks that share this device."""
        one = self.rank_plan()
        return Plan({scope: peak * self.sharing for scope, peak in one.peaks.items()}, one.reason)

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Rounds, bytes and memory of each form."""
        forms = [form for form in self.prefill_forms if form != DENSE]
        peaks = self.rank_plan().peaks
        found: dict[str, float | str] = {
            "peak memory per rank": ", ".join(
                f"{form} {peaks[f'{form} forward'] / MIB:.4g} MiB" for form in self.prefill_forms
            )
        }
        if forms and self.world_size > 1:
            found |= traffic_words({form: self.traffic(form) for form in forms})
        return found

    def rank_plan(self) -> Plan:
        """Peak memory of one rank, for each scope; the other ranks are simulated."""

        def workloads() -> Iterator[Workload]:
            for scope in self.scopes:
                form = scope.split()[0]
                tensors = _shard(self, form, 0, 0, torch.device(self.device))
                yield Workload(scope, _calls(self, form, tensors)[scope], lambda held=tensors: held)

        with _pretended_ranks(self.world_size):
            return planned(self, workloads)

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """All rows of a case: times, parts, bytes, errors, and memory beside its plan."""
        plan = self.rank_plan()
        answers, flags = measure_on_ranks(
            rank, self, params, private_network=params.private_network
        )
        rounds = rounds_of(answers)
        for scope in self.scopes:
            blocks = [answer["blocks"][scope] for answer in answers]
            yield latency_row(blocks, scope, flags, threads=self.threads)
            peak = max(answer["peaks"][scope] for answer in answers)
            yield exact(
                "peak_memory",
                peak / MIB,
                scope=scope,
                method=f"{answers[0]['peak method']}, largest rank",
                predicted=plan.peaks[scope] / MIB if scope in plan.peaks else None,
            )
            alike = [other for other in self.scopes if other.split()[1] == scope.split()[1]]
            yield from speed_up_rows(rounds, scope, alike, flags)
        for form in self.prefill_forms:
            yield from part_rows([answer["parts"][form] for answer in answers], form, flags, None)
            if form != DENSE and self.world_size > 1:
                traffic = self.traffic(form)
                yield exact("rounds", traffic.rounds, scope=form)
                yield from bytes_rows(form, traffic.sent, answers[0]["bytes"].get(form), flags)
            errors = [answer["errors"][form] for answer in answers if form in answer["errors"]]
            if errors:
                yield Measurement(
                    "relative_error", max(errors), n=len(errors), method="float64", scope=form
                )


@dataclass(frozen=True)
class MemoryCase(Case):
    """The peak memory of attention over a sequence: planned, and measured on one rank where that is asked for."""

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
        """Form, ranks and length."""
        return f"memory {self.memory_form} {self.world_size} rank(s) n={self.seq_len}"

    def unsupported(self) -> str:
        """Why this machine cannot run it."""
        return lacking(self.device, 1)

    @property
    def _is_run(self) -> bool:
        return (
            self.measured and self.world_size == 1 and not shortage(self._rank_plan(), self.device)
        )

    def plan(self) -> Plan:
        """What running it needs; most are planned alone."""
        return (
            self._rank_plan()
            if self._is_run
            else Plan(reason="its memory is told without running it")
        )

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """The peak memory of one rank, MiB."""
        most = self._rank_plan().most
        return {} if most is None else {"peak_memory": most / MIB}

    def _rank_plan(self) -> Plan:
        """The peak of a forward pass on one rank."""
        shape = (self.batch_size, self.num_heads, self.num_kv_heads, self.head_dim, self.dtype)
        if self.memory_form in (RING, ULYSSES):
            twin = PrefillCase(
                self.device, self.world_size, self.seq_len, (self.memory_form,), *shape, False, 1
            )
            return twin.rank_plan()

        return planned(self, lambda: [self._dense_workload()])

    def _dense_workload(self) -> Workload:
        shapes = [
            (self.batch_size, heads, self.seq_len, self.head_dim)
            for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        ]
        tensors = [
            torch.randn(shape, dtype=getattr(torch, self.dtype), device=self.device)
            for shape in shapes
        ]
        options = {"backend": self.memory_form}

        def call() -> torch.Tensor:
            with torch.no_grad():
                return attention.attend("dense", *tensors, causal=True, options=options)

        return Workload(f"{self.memory_form} forward", call, lambda: tensors)

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """`peak_memory`: measured where that is asked for, fits, and takes one rank alone; else planned (`modelled`)."""
        scope = f"{self.memory_form} forward"
        plan = self._rank_plan()
        if self._is_run:
            work = self._dense_workload()
            work.call()
            with peak_memory(self.device, *work.existing()) as peak:
                work.call()
            predicted = plan.most / MIB if plan.most is not None else None
            yield exact(
                "peak_memory", peak.own / MIB, scope=scope, method=peak.method, predicted=predicted
            )
        elif plan.most is not None:
            yield exact(
                "peak_memory",
                plan.most / MIB,
                scope=scope,
                method="plan",
                provenance=Provenance.MODELLED,
            )


@contextlib.contextmanager
def _pretended_ranks(world_size: int) -> Iterator[None]:
    """A process group whose collectives do nothing: enough for tensors that have no data."""
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


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures; see the case's `measure`."""
    case, seed, budget_s, device = asked_case(PrefillCase, asked)
    me = dist.get_rank()
    calls: dict[str, Callable[[], object]] = {}
    timed: dict[str, Callable[[Any], object]] = {}
    peaks, errors, counted = {}, {}, {}
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
        if case.seq_len**2 * case.batch_size * case.num_heads <= _CHECKED_SCORES * case.world_size:
            errors[form] = _error(case, form, tensors, me, seed, device)
        if case.world_size > 1 and form != DENSE:
            counted[form] = count_bytes(mine[f"{form} forward"], calls=2)
    blocks = time_together(calls, budget_s, device=device, seed=seed)
    parts = parts_together(timed, budget_s, device=device)
    told = {
        "blocks": blocks.ms,
        "busy": blocks.is_busy,
        "parts": parts,
        "errors": errors,
        "bytes": counted,
    }
    return told | {"peaks": peaks, "peak method": peak.method}


def _attend(case: PrefillCase, form: str, q: Any, k: Any, v: Any, **more: Any) -> torch.Tensor:
    if form == DENSE:  # nothing on all ranks but the first
        return attention.attend("dense", q, k, v, causal=True) if q.numel() else q
    if form == ULYSSES:
        return ulysses_attention(q, k, v, layout=case.layout(form), **more)
    return ring_attention(q, k, v, layout=case.layout(form), **more)


def _calls(
    case: PrefillCase, form: str, tensors: tuple[torch.Tensor, ...]
) -> dict[str, Callable[[], object]]:
    """Scope → call: without gradients, and with them."""
    q, k, v, grad = tensors

    def attend() -> torch.Tensor:
        return _attend(case, form, q, k, v)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attend()

    def training() -> Any:
        if form == DENSE and not q.numel():
            return None
        return torch.autograd.grad(attend(), (q, k, v), grad)

    both = {f"{form} forward": forward, f"{form} training": training}
    return {scope: call for scope, call in both.items() if scope in case.scopes}


def _timed(
    case: PrefillCase, form: str, tensors: tuple[torch.Tensor, ...]
) -> Callable[[Any], object]:
    """A forward pass part by part; hops do not overlap with blocks, or they could not be told apart."""
    q, k, v, _ = tensors

    def call(timer: Any) -> None:
        with torch.no_grad():
            if form == DENSE:
                with timer.time_block("comp_attention"):
                    _attend(case, form, q, k, v)
            elif form == ULYSSES:
                _attend(case, form, q, k, v, timer=timer)
            else:
                _attend(case, form, q, k, v, timer=timer, overlap=False)

    return call


def _whole(case: PrefillCase, seed: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Queries, keys, values and a gradient of the output, of the whole sequence; the same on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    for heads in (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads):
        shape = (case.batch_size, heads, case.seq_len, case.head_dim)
        yield torch.randn(
            *shape, generator=generator, dtype=getattr(torch, case.dtype), device=device
        )


def _shard(
    case: PrefillCase, form: str, me: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    parts = [case.layout(form).take(x, me).clone() for x in _whole(case, seed, device)]
    for x in parts[:3]:
        x.requires_grad_(case.backward)
    return tuple(parts)


def _error(
    case: PrefillCase, form: str, tensors: tuple[torch.Tensor, ...], me: int, seed: int, device: Any
) -> float:
    """Of this rank's part against float64."""
    q, k, v, _ = tensors
    with torch.no_grad():
        out = _attend(case, form, q, k, v)
        _, keys, values, _ = _whole(case, seed, device)
        mask = case.layout(form).take(causal_mask(case.seq_len, case.seq_len, device), me, dim=0)
        return relative_error(out, masked_attention(q, keys, values, mask)) if out.numel() else 0.0
