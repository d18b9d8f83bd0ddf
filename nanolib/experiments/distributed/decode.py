"""Decoding over a cache that is sharded across ranks: each form's time, its parts, its bytes, and what more ranks would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nanolib.experiments.distributed.rank_rows import (
    bytes_rows,
    latency_row,
    part_rows,
    rounds_of,
    slowest,
    speed_up_rows,
    traffic_words,
)
from nanolib.measurement import Flag, Measurement, Provenance, Status, exact
from nanolib.meters.links import count_bytes, time_collectives
from nanolib.meters.memory import MIB
from nanolib.meters.network import only_loopback
from nanolib.meters.time.together import parts_together, time_together
from nanolib.models.attention.layout import Layout
from nanolib.models.attention.ranks import NO_TIMER
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.traffic import Traffic, decode_traffic
from nanolib.models.attention.tree import attend_alone, tree_attention_decode
from nanolib.run.case import Plan
from nanolib.run.ranks import RanksCase, asked_case, measure_on_ranks
from nanolib.run.workload import shortage
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import LinkCost, link_cost

ONE_RANK = "one rank"  # attends to the whole sequence while the others wait
_CHECKED_ELEMENTS = (
    2**25
)  # keys and values of the whole sequence, up to which one rank compares with float64


@dataclass(frozen=True)
class DecodeCase(RanksCase):
    """One token (or a few) over a sequence on so many ranks, in every form."""

    world_size: int
    seq_len: int
    forms: tuple[str, ...]
    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_len: int
    dtype: str
    threads: int

    @property
    def layout(self) -> Layout:
        """Which keys each rank holds."""
        return Layout.plain(self.seq_len, self.world_size)

    @property
    def shard_bytes(self) -> int:
        """Keys and values of one rank."""
        per_key = (
            2
            * self.batch_size
            * self.num_kv_heads
            * self.head_dim
            * getattr(torch, self.dtype).itemsize
        )
        return per_key * max(self.layout.length(rank) for rank in range(self.world_size))

    def traffic(self, form: str, world_size: int | None = None) -> Traffic:
        """What the form sends, on so many ranks."""
        layout = Layout.plain(self.seq_len, world_size or self.world_size)
        return decode_traffic(
            form,
            layout,
            batch=self.batch_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            q_len=self.q_len,
            itemsize=getattr(torch, self.dtype).itemsize,
        )

    def __str__(self) -> str:
        """Ranks, length and type."""
        return f"decode {self.ranks} n={self.seq_len} batch={self.batch_size} {self.dtype}"

    def plan(self) -> Plan:
        """Keys and values of the ranks that share this device."""
        return Plan({"decode": self.shard_bytes * self.sharing})

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Rounds and bytes of each form, and what each rank holds."""
        sent = {form: self.traffic(form) for form in self.forms}
        return {"shard": f"{self.shard_bytes / MIB:.4g} MiB"} | traffic_words(sent)

    @property
    def _fits_one_rank(self) -> bool:
        """Whether the first rank can hold the whole sequence beside its share."""
        whole = dataclasses.replace(self, world_size=1, nodes=1).shard_bytes
        shares = self.shard_bytes * self.sharing
        return not shortage(
            Plan({"decode": shares + 2 * whole}), self.device
        )  # it is put together from its parts

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """All rows of a case: the forms' times and speed-ups, their parts, bytes, errors, and the cost model."""
        asked = {"alone": self.world_size > 1 and self._fits_one_rank}
        answers, flags = measure_on_ranks(
            rank, self, params, private_network=params.private_network, more=asked
        )
        rounds = rounds_of(answers)
        link = None
        if self.world_size > 1:
            link, rows = link_rows(answers, self.world_size, flags)
            yield from rows
        if asked["alone"]:
            yield latency_row(
                [answers[0]["blocks"][ONE_RANK]], ONE_RANK, flags, threads=self.threads
            )
        for form in self.forms:
            traffic = self.traffic(form)
            blocks = [answer["blocks"][form] for answer in answers]
            yield latency_row(blocks, form, flags, threads=self.threads)
            yield from speed_up_rows(rounds, form, answers[0]["blocks"], flags)
            yield exact("rounds", traffic.rounds, scope=form)
            yield from bytes_rows(form, traffic.sent, answers[0]["bytes"].get(form), flags)
            modelled = 1e3 * link.seconds(traffic.hops, max(traffic.sent)) if link else None
            parts = [answer["parts"][form] for answer in answers]
            rows = list(part_rows(parts, form, flags, modelled))
            yield from rows
            if link:
                compute = next(row.estimate for row in rows if row.scope == f"{form}: compute")
                yield from _extrapolated(self, form, compute, link, params.model_world_sizes, flags)
            error = max(
                (answer["errors"][form] for answer in answers if form in answer["errors"]),
                default=None,
            )
            if error is not None:
                yield Measurement(
                    "relative_error", error, n=self.world_size, method="float64", scope=form
                )
        yield exact("footprint", self.shard_bytes / MIB, scope="keys and values of a rank")
        if self.world_size > 1 and not answers[0]["private"]:
            yield Measurement(
                "wire_bytes", status=Status.UNSUPPORTED, scope="interface", message=NO_NETWORK
            )


NO_NETWORK = "the ranks have no network of their own, so an interface would count other traffic too; see wire_bytes by formula"


def link_rows(
    answers: list[dict[str, Any]], world_size: int, flags: tuple[Flag, ...]
) -> tuple[LinkCost | None, list[Measurement]]:
    """Collectives by size, and the cost per message and per byte that fits them."""
    rows, medians = [], []
    for at, link in enumerate(answers[0]["links"]):
        blocks = [answer["links"][at]["blocks"] for answer in answers]
        medians.append(float(np.median(slowest(blocks))))
        shape = {name: link[name] for name in ("collective", "payload", "messages", "sent")}
        rows.append(
            (
                shape,
                latency_row(blocks, f"{link['collective']} of {link['payload']} B", flags, **shape),
            )
        )
    shapes = [shape for shape, _ in rows]
    try:
        fitted = link_cost(
            [shape["messages"] for shape in shapes],
            [shape["sent"] for shape in shapes],
            [ms / 1e3 for ms in medians],
        )
    except TooFewSamples:
        return None, [row for _, row in rows]
    told = []
    for shape, row in rows:
        predicted = 1e3 * fitted.seconds(shape["messages"], shape["sent"])
        told.append(Measurement.from_dict(row.to_dict() | {"predicted": predicted}))
    spread = {
        "residuals": list(fitted.residuals),
        "largest_residual": max(map(abs, fitted.residuals)),
    }
    shared = {
        "n": len(medians),
        "method": "least squares over collectives",
        "flags": flags,
        "details": spread,
    }
    told.append(
        Measurement("link_latency", 1e3 * fitted.alpha, scope=f"{world_size} ranks", **shared)
    )
    if fitted.beta:
        told.append(
            Measurement("link_bandwidth", 1 / fitted.beta, scope=f"{world_size} ranks", **shared)
        )
    return fitted, told


def _extrapolated(
    case: DecodeCase,
    form: str,
    compute_ms: float,
    link: LinkCost,
    world_sizes: list[int],
    flags: tuple[Flag, ...],
) -> Iterator[Measurement]:
    """What the cost model says of more ranks: computing shared out evenly, messages and bytes by formula."""
    for world in world_sizes:
        if world <= case.world_size:
            continue
        traffic = case.traffic(form, world)
        sending = 1e3 * link.seconds(traffic.hops, max(traffic.sent))
        yield Measurement(
            "latency",
            compute_ms * case.world_size / world + sending,
            n=1,
            provenance=Provenance.MODELLED,
            method="alpha-beta",
            scope=f"{form} at {world} ranks",
            flags=flags,
            details={
                "form": form,
                "world_size": world,
                "compute": compute_ms * case.world_size / world,
                "sending": sending,
            },
        )


# On the ranks


def rank(asked: dict[str, Any]) -> dict[str, Any]:
    """What one rank measures; see the case's `measure`."""
    alone = asked.pop("alone")
    case, seed, budget_s, device = asked_case(DecodeCase, asked)
    me = dist.get_rank()
    links = time_collectives(budget_s, device=device, seed=seed) if case.world_size > 1 else []
    with torch.no_grad():
        q, k, v = _inputs(case, me, seed, device)

        def calling(form: str) -> Any:
            return lambda timer=NO_TIMER: tree_attention_decode(
                q, k, v, algorithm=form, layout=case.layout, timer=timer
            )

        calls = {form: calling(form) for form in case.forms}
        errors = {}
        elements = 2 * case.batch_size * case.num_kv_heads * case.seq_len * case.head_dim
        if elements <= _CHECKED_ELEMENTS:
            whole = _whole(case, seed, device)
            reference = masked_attention(q, *whole, causal_mask(case.q_len, case.seq_len, device))
            errors = {form: relative_error(call(), reference) for form, call in calls.items()}
        whole = _whole(case, seed, device) if alone and me == 0 else None

        def one_rank() -> torch.Tensor | None:
            return None if whole is None else attend_alone(q, *whole)

        counted = (
            {form: count_bytes(call) for form, call in calls.items()} if case.world_size > 1 else {}
        )
        timed = calls | ({ONE_RANK: one_rank} if alone else {})
        blocks = time_together(timed, budget_s, device=device, seed=seed)
        return {
            "links": links,
            "blocks": blocks.ms,
            "busy": blocks.is_busy,
            "parts": parts_together(calls, budget_s, device=device),
            "errors": errors,
            "bytes": counted,
            "private": only_loopback(),
        }


def _inputs(case: DecodeCase, me: int, seed: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Queries, the same on every rank, and a rank's keys and values."""
    dtype = getattr(torch, case.dtype)

    def random(number: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + number)
        return torch.randn(*shape, generator=generator, dtype=dtype, device=device)

    length = case.layout.length(me)
    q = random(0, case.batch_size, case.num_heads, case.q_len, case.head_dim)
    shape = (case.batch_size, case.num_kv_heads, length, case.head_dim)
    return q, random(2 * me + 1, *shape), random(2 * me + 2, *shape)


def _whole(case: DecodeCase, seed: int, device: torch.device) -> list[torch.Tensor]:
    """Keys and values of the whole sequence."""
    parts = [_inputs(case, rank, seed, device) for rank in range(case.world_size)]
    return [torch.cat([part[at] for part in parts], dim=2) for at in (1, 2)]
