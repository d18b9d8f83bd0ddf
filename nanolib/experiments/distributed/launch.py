"""Make rows of measurements from the times of all ranks of a launch.

The time of a call is the time on the slowest rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from nanolib.measurement import OVER, Flag, Measurement, Measurements, exact
from nanolib.meters.latency import summarize
from nanolib.meters.ranks import KINDS
from nanolib.meters.turns import Round, speed_up_row
from nanolib.models.attention.ranks import Traffic
from nanolib.numbers import MIB
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import LinkCost, link_cost

_SLOWEST = "perf_counter, slowest rank"


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

    def _slowest(self, scope: str) -> np.ndarray:
        """Return the time of the slowest rank in each block, ms, shape [blocks]."""
        return np.max([answer["blocks"][scope] for answer in self.answers], axis=0)

    def latency(self, name: str, scope: str, **details: Any) -> Measurement:
        """Return the `latency` of a call that all ranks make together."""
        row = summarize(self._slowest(name), scope=scope, method=_SLOWEST, details=details)
        return replace(row, flags=(*row.flags, *self.flags))

    @cached_property
    def _rounds(self) -> list[Round]:
        ms = {scope: self._slowest(scope) for scope in self.answers[0]["blocks"]}
        busy = np.any([answer["busy"] for answer in self.answers], axis=0)
        return [
            Round({scope: blocks[at : at + 1] for scope, blocks in ms.items()}, bool(is_busy))
            for at, is_busy in enumerate(busy)
        ]

    def speed_ups(self, name: str, others: Iterable[str], scope: str) -> Measurements:
        """Yield the speed-ups of a call over other calls, if enough rounds contain both calls."""
        for other in others:
            row = speed_up_row(self._rounds, name, other, scope=f"{scope}{OVER}{other}")
            if row:
                yield replace(row, flags=(*row.flags, *self.flags))

    def counts(
        self, name: str, scope: str, traffic: Traffic | None, planned_mib: float | None = None
    ) -> Measurements:
        """Yield the largest peak and error of all ranks, and the communication of one call.

        Args:
            name: Name of the algorithm.
            scope: Scope of the rows.
            traffic: Communication of one call by formula, or None if there is no formula.
            planned_mib: Planned peak memory of a rank, MiB.
        """
        found = [answer["found"][name] for answer in self.answers]
        peak = max(one["peak"] for one in found) / MIB
        method = f"{found[0]['method']}, largest rank"
        yield exact("peak_memory", peak, scope=scope, method=method, predicted=planned_mib)
        if "error" in found[0]:
            error = max(one["error"] for one in found)
            yield Measurement("relative_error", error, n=len(found), method="float64", scope=scope)
        if traffic is None:
            return
        mean = sum(traffic.sent) / len(traffic.sent)
        yield exact("communication_steps", traffic.rounds, scope=scope)
        yield exact("wire_bytes", mean, scope=scope, details={"most": max(traffic.sent)})
        if (counted := found[0].get("bytes")) is not None:
            how = {"n": 1, "method": "interface", "predicted": mean, "flags": self.flags}
            yield Measurement("wire_bytes", counted / len(found), scope=scope, **how)

    def parts(self, name: str, predicted_ms: float | None = None) -> Measurements:
        """Yield a `component_time` row per part, and for compute, wait and communication.

        Args:
            name: Name of the call.
            predicted_ms: Communication time of one call by the cost model, ms.
        """
        ranks = {
            rank: pd.DataFrame(answer["parts"].get(name))
            for rank, answer in enumerate(self.answers)
        }
        parts = pd.concat(ranks).fillna(0.0)
        if parts.empty:  # nanolib times no parts of a training pass.
            return
        for prefix, kind in KINDS.items():
            parts[kind] = parts.filter(regex=f"^{prefix}(_|$)").sum(axis=1)
        for scope, ms in parts.items():
            longest = ms.groupby(level=1).max()  # The levels are ranks and runs.
            row = summarize(longest.to_numpy(), scope=scope, method=_SLOWEST)
            predicted = predicted_ms if scope == "communication" else None
            yield replace(row, metric="component_time", predicted=predicted, flags=self.flags)


def link_rows(launch: Launch, scope: str) -> tuple[LinkCost | None, list[Measurement]]:
    """Fit the cost per message and per byte to the times of collectives.

    Args:
        launch: Results from the ranks. The list `links` in each result contains the messages, the
            bytes and the scope of each collective.
        scope: Scope of the rows with the fitted cost.

    Returns:
        The fitted cost and the rows. The cost is None if too few sizes were timed. The rows
        contain the times of the collectives and, if there is one, the fitted cost.
    """
    rows = [launch.latency(link["scope"], **link) for link in launch.answers[0]["links"]]
    messages, sent = ([row.details[name] for row in rows] for name in ("messages", "sent"))
    try:
        link = link_cost(messages, sent, [np.median(row.samples) / 1e3 for row in rows])
    except TooFewSamples:
        return None, rows
    costs = zip(rows, messages, sent, strict=True)
    rows = [replace(row, predicted=1e3 * link.seconds(*cost)) for row, *cost in costs]
    fit = {
        "n": len(rows),
        "method": "least squares over collectives",
        "scope": scope,
        "flags": launch.flags,
        "details": {"residuals": list(link.residuals)},
    }
    rows.append(Measurement("link_latency", 1e3 * link.alpha, **fit))
    if link.beta:
        rows.append(Measurement("link_bandwidth", 1 / link.beta, **fit))
    return link, rows
