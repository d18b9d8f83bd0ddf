"""Attend to one rank's part of a sequence, and make rows from the results of all ranks.

The time of a call is the time on the slowest rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from nanolib.measurement import OVER, Flag, Measurement, Measurements, exact
from nanolib.meters.latency import summarize
from nanolib.meters.ranks import KINDS
from nanolib.meters.turns import Round, speed_up_row
from nanolib.models import attention
from nanolib.models.attention.partial import partial_attention
from nanolib.models.attention.ranks import Sharding
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sequence import ring_attention, ulysses_attention
from nanolib.models.attention.tree import tree_attention_decode
from nanolib.numbers import MIB
from nanolib.stats.intervals import LinkCost, link_cost

# Only the first rank computes these algorithms, and the other ranks wait.
WHOLE = ("dense", "math")
_SLOWEST = "perf_counter, slowest rank"


def draw(case, layout: Sharding, rank: int, seed: int, device: torch.device) -> list[Tensor]:
    """Draw a rank's parts of random tensors, which do not depend on the layout.

    The function draws one head at a time, so no rank needs memory for the whole sequence.

    Returns:
        q, k, v and, for training, the gradient of the output, shape
        [batch, heads, local_len, head_dim] each. In decoding, q has one token on every rank.
    """
    generator = torch.Generator(device).manual_seed(seed)
    like = {"dtype": getattr(torch, case.dtype), "device": device}
    counts = [case.num_heads, case.num_kv_heads, case.num_kv_heads]
    counts += [case.num_heads] if case.phase == "training" else []
    tensors = []
    for heads in counts:
        is_query = case.phase == "decode" and not tensors
        length, total = (1, 1) if is_query else (layout.lengths[rank], case.seq_len)
        part = torch.empty(case.batch_size, heads, length, case.head_dim, **like)
        for head in part.split(1, dim=1):
            whole = torch.randn(
                case.batch_size, 1, total, case.head_dim, generator=generator, **like
            )
            head.copy_(whole if is_query else layout.take(whole, rank))
        tensors.append(part)
    if case.phase == "training":
        for part in tensors[:3]:
            part.requires_grad_()
    return tensors


@dataclass(frozen=True)
class Share:
    """One rank's part of a sequence, with the calls of one algorithm on this part.

    Attributes:
        case: Case with the phase and the algorithm.
        rank: Number of the rank.
        tensors: The rank's tensors from `draw`.
        whole: Tensors of the whole sequence, or nothing if no check needs them.
    """

    case: Any
    rank: int
    tensors: Sequence[Tensor]
    whole: Sequence[Tensor] = ()

    def call(self):
        """Run the call whose time and memory nanolib measures."""
        if self.case.phase == "training":
            *inputs, gradient = self.tensors
            return torch.autograd.grad(self._attend(), inputs, gradient, allow_unused=True)
        with torch.no_grad():
            return self._attend()

    def _attend(self, shard: Sequence[Tensor] = (), timer=None) -> Tensor:
        algorithm, is_decoding = self.case.algorithm, self.case.phase == "decode"
        q, k, v = self.tensors[0], *(shard or self.tensors[1:3])
        if algorithm in WHOLE:  # Only the first rank has keys.
            if self.rank > 0:
                return q[:, :, :0]
            if is_decoding:  # This is faster than the dense kernel if heads share keys.
                return partial_attention(q, k, v)[0].to(q.dtype)
            options = {"backend": "math"} if algorithm == "math" else None
            return attention.attend("dense", q, k, v, causal=True, options=options)
        how = {"layout": self.case.layout, "timer": timer}
        if is_decoding:
            return tree_attention_decode(q, k, v, algorithm=algorithm, **how)
        if algorithm == "ulysses":
            return ulysses_attention(q, k, v, **how)
        return ring_attention(q, k, v, overlap=timer is None, **how)

    @torch.no_grad()
    def run_in_parts(self, timer) -> None:
        """Run the parts one after the other, because overlapping parts have no separate times."""
        case, shard = self.case, ()
        if case.algorithm == "dense":
            with timer.time_block("comp_attention"):
                self._attend()
            return
        if case.phase == "decode" and self.whole:  # A long sequence is on no rank as a whole.
            with timer.time_block("comp_shard_kv"):
                shard = [case.layout.take(x, self.rank) for x in self.whole[1:3]]
        self._attend(shard, timer)

    def error(self) -> float:
        """Return the relative error of this rank's output against float64."""
        with torch.no_grad():
            out = self._attend()
        if not out.numel():
            return 0.0
        n, device = self.case.seq_len, out.device
        if self.case.phase == "decode":
            mask = causal_mask(1, n, device)
        else:
            mask = self.case.layout.take(causal_mask(n, n, device), self.rank, dim=0)
        q, *keys = self.tensors[0].detach(), *self.whole[1:3]
        return relative_error(out, masked_attention(q, *keys, mask))


@dataclass(frozen=True)
class Launch:
    """Results from all ranks of one launch. The methods make rows of measurements.

    Attributes:
        answers: Result of each rank. `blocks` is the time per scope and round, in ms. `busy` marks
            the rounds in which other processes used the machine. `parts` is the time per algorithm,
            run and part, in ms. `found` is, per algorithm, the `peak` of the live bytes, and maybe
            the `error` against float64 and the counted `bytes`.
        flags: Flags of every row that contains a time or counted bytes.
    """

    answers: Sequence[Mapping[str, Any]]
    flags: tuple[Flag, ...] = ()

    @cached_property
    def _ms(self) -> dict[str, np.ndarray]:
        """The time of the slowest rank in each block, by scope, ms, shape [blocks] each."""
        return {
            scope: np.max([answer["blocks"][scope] for answer in self.answers], axis=0)
            for scope in self.answers[0]["blocks"]
        }

    def latency(self, name: str, scope: str, **details) -> Measurement:
        """Return the `latency` of a call that all ranks make together."""
        row = summarize(self._ms[name], scope=scope, method=_SLOWEST, details=details)
        return replace(row, flags=(*row.flags, *self.flags))

    @cached_property
    def _rounds(self) -> list[Round]:
        busy = np.any([answer["busy"] for answer in self.answers], axis=0)
        return [
            Round({scope: ms[index : index + 1] for scope, ms in self._ms.items()}, bool(is_busy))
            for index, is_busy in enumerate(busy)
        ]

    def rows(self, case) -> Measurements:
        """Yield the time, the speed-ups, the memory, the error and the communication of a case.

        The memory and the error are the largest of all ranks. A speed-up over another algorithm of
        the launch needs enough rounds.
        """
        name, scope, traffic = case.algorithm, case.phase, case.traffic()
        yield self.latency(name, scope)
        for other in self.answers[0]["found"]:
            if other == name:
                continue
            if row := speed_up_row(self._rounds, name, other, scope=f"{scope}{OVER}{other}"):
                yield replace(row, flags=(*row.flags, *self.flags))
        found = [answer["found"][name] for answer in self.answers]
        yield exact(
            "peak_memory",
            max(share["peak"] for share in found) / MIB,
            scope=scope,
            method=f"{found[0]['method']}, largest rank",
            predicted=case.predict().get("peak_memory"),
        )
        if "error" in found[0]:
            error = max(share["error"] for share in found)
            yield Measurement("relative_error", error, n=len(found), method="float64", scope=scope)
        if traffic is None:
            return
        mean = sum(traffic.sent) / len(traffic.sent)
        yield exact("communication_steps", traffic.rounds, scope=scope)
        yield exact("wire_bytes", mean, scope=scope, details={"most": max(traffic.sent)})
        if (counted := found[0].get("bytes")) is not None:
            yield Measurement(
                "wire_bytes",
                counted / len(found),
                n=1,
                method="interface",
                scope=scope,
                flags=self.flags,
                predicted=mean,
            )

    def parts(self, name: str, predicted_ms: float | None = None) -> Measurements:
        """Yield a `component_time` row per part, and for compute, wait and communication.

        Args:
            name: Name of the call.
            predicted_ms: Communication time of one call by the cost model, ms.
        """
        runs = [pd.DataFrame(answer["parts"].get(name)) for answer in self.answers]
        parts = pd.concat(runs).fillna(0.0)
        if parts.empty:  # nanolib times no parts of a training pass.
            return
        for prefix, kind in KINDS.items():
            parts[kind] = parts.filter(regex=f"^{prefix}(_|$)").sum(axis=1)
        for scope, longest in parts.groupby(level=0).max().items():  # The index is the run.
            row = summarize(longest.to_numpy(), scope=scope, method=_SLOWEST)
            predicted = predicted_ms if scope == "communication" else None
            yield replace(row, metric="component_time", predicted=predicted, flags=self.flags)


def link_rows(launch: Launch) -> tuple[LinkCost | None, list[Measurement]]:
    """Fit the cost per message and per byte to the times of collectives.

    Args:
        launch: Results from the ranks. The list `links` in each result contains the messages, the
            bytes and the scope of each collective.

    Returns:
        The fitted cost and the rows. The cost is None if no collectives were timed. The rows
        contain the times of the collectives and the fitted cost.
    """
    links = launch.answers[0]["links"]
    if not links:
        return None, []
    rows = [launch.latency(link["scope"], **link) for link in links]
    messages, sent = ([link[name] for link in links] for name in ("messages", "sent"))
    cost = link_cost(messages, sent, [np.median(row.samples) / 1e3 for row in rows])
    rows = [
        replace(row, predicted=1e3 * cost.seconds(row.details["messages"], row.details["sent"]))
        for row in rows
    ]
    fit = {
        "n": len(rows),
        "method": "least squares over collectives",
        "scope": f"{len(launch.answers)} ranks",
        "flags": launch.flags,
        "details": {"residuals": list(cost.residuals)},
    }
    rows.append(Measurement("link_latency", 1e3 * cost.alpha, **fit))
    if cost.beta:
        rows.append(Measurement("link_bandwidth", 1 / cost.beta, **fit))
    return cost, rows
