"""Time calls on all ranks of a case, and make rows of measurements from the times.

The time of a call is the time on the slowest rank.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch

from nanolib.measurement import OVER, Flag, Measurement, Measurements, exact
from nanolib.meters.time.latency import summarize
from nanolib.meters.time.ranks import KINDS, time_across_ranks, time_parts_across_ranks
from nanolib.meters.time.sampler import interval_of
from nanolib.meters.time.turns import Round, speed_up_row
from nanolib.models.attention.ranks import Traffic
from nanolib.run.case import Predicted

_SLOWEST = "perf_counter, slowest rank"


def time_calls(
    calls: Mapping[str, Callable[[], object]],
    parts: Mapping[str, Callable[[Any], object]],
    *,
    budget_s: float,
    device: torch.device,
    seed: int,
) -> dict[str, Any]:
    """Time whole calls in turns on this rank, and then time the parts of the calls.

    Args:
        calls: Whole calls by scope.
        parts: Functions by algorithm. Each function makes a call, and times its parts with a timer.
        budget_s: Time limit for the whole calls, and again for the parts, s.
        device: Device of this rank.
        seed: Seed of the random order of the turns.

    Returns:
        `blocks` is the time per scope and round, in ms. `busy` marks the rounds in which other
        processes used the machine. `parts` is the time per algorithm, run and part, in ms.
    """
    blocks = time_across_ranks(calls, budget_s, device=device, seed=seed)
    timed = time_parts_across_ranks(parts, budget_s, device=device)
    return {"blocks": blocks.ms, "busy": blocks.is_busy, "parts": timed}


def predict_traffic(sent: Mapping[str, Traffic]) -> Predicted:
    """Return the communication steps of each algorithm, and the most bytes that a rank sends."""
    return {
        "communication steps": {name: traffic.rounds for name, traffic in sent.items()},
        "bytes sent per rank": {name: max(traffic.sent) for name, traffic in sent.items()},
    }


@dataclass(frozen=True)
class Launch:
    """Results from all ranks of one case. The methods make rows of measurements.

    Attributes:
        answers: Result of `time_calls` on each rank, with `bytes` and `errors` by algorithm.
        flags: Flags of every row that contains a time or counted bytes.
    """

    answers: Sequence[Mapping[str, Any]]
    flags: tuple[Flag, ...] = ()

    def slowest(self, scope: str) -> np.ndarray:
        """Return the time of the slowest rank in each block, ms, shape [blocks]."""
        return np.max([answer["blocks"][scope] for answer in self.answers], axis=0)

    def latency(self, scope: str, **details: Any) -> Measurement:
        """Return the `latency` of a call that all ranks make together."""
        row = summarize(self.slowest(scope), scope=scope, method=_SLOWEST, details=details)
        return replace(row, flags=(*row.flags, *self.flags))

    @cached_property
    def _rounds(self) -> list[Round]:
        ms = {scope: self.slowest(scope) for scope in self.answers[0]["blocks"]}
        busy = np.any([answer["busy"] for answer in self.answers], axis=0)
        return [
            Round({scope: blocks[at : at + 1] for scope, blocks in ms.items()}, bool(is_busy))
            for at, is_busy in enumerate(busy)
        ]

    def speed_ups(self, scope: str, others: Iterable[str]) -> Measurements:
        """Yield the speed-ups of a call over other calls, if enough rounds contain both calls."""
        for other in others:
            if other == scope:
                continue
            row = speed_up_row(self._rounds, scope, other, scope=f"{scope}{OVER}{other}")
            if row:
                yield replace(row, flags=(*row.flags, *self.flags))

    def algorithm(
        self, algorithm: str, traffic: Traffic | None, predicted_ms: float | None = None
    ) -> Measurements:
        """Yield rows with the traffic, the time of each part, and the error of an algorithm.

        Args:
            algorithm: Name of the algorithm.
            traffic: Communication of one call by formula, or None if a call sends nothing.
            predicted_ms: Communication time of one call by the cost model, ms.
        """
        if traffic:
            mean = sum(traffic.sent) / len(traffic.sent)
            yield exact("communication_steps", traffic.rounds, scope=algorithm)
            yield exact("wire_bytes", mean, scope=algorithm, details={"most": max(traffic.sent)})
            counted = self.answers[0]["bytes"].get(algorithm)
            if counted is not None:
                how = {"n": 1, "method": "interface", "predicted": mean, "flags": self.flags}
                each = counted / len(self.answers)
                yield Measurement("wire_bytes", each, scope=algorithm, **how)
        yield from self._parts(algorithm, predicted_ms)
        errors = [answer["errors"].get(algorithm) for answer in self.answers]
        if None not in errors:
            how = {"n": len(errors), "method": "float64", "scope": algorithm}
            yield Measurement("relative_error", max(errors), **how)

    def _parts(self, algorithm: str, predicted_ms: float | None) -> Measurements:
        """Yield a `component_time` row per part, and for compute, wait and communication."""
        ranks = {
            rank: pd.DataFrame(one["parts"][algorithm]) for rank, one in enumerate(self.answers)
        }
        parts = pd.concat(ranks).fillna(0.0)
        kinds = {
            kind: parts.filter(regex=f"^{prefix}(_|$)").sum(axis=1)
            for prefix, kind in KINDS.items()
        }
        for name, ms in parts.drop(columns="wait", errors="ignore").assign(**kinds).items():
            longest = ms.groupby(level=1).max().to_numpy()  # The levels are ranks and runs.
            low, estimate, high, confidence = interval_of(longest)
            yield Measurement(
                "component_time",
                estimate,
                low,
                high,
                confidence,
                len(longest),
                tuple(longest.tolist()),
                predicted_ms if name == "communication" else None,
                method=_SLOWEST,
                scope=f"{algorithm}: {name}",
                flags=self.flags,
            )
