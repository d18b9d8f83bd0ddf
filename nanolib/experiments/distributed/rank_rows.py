"""Rows from what the ranks measured: a call takes as long as on its slowest rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanolib.measurement import OVER, Flag, Measurement, exact
from nanolib.meters.time.latency import summarise
from nanolib.meters.time.sampler import interval_of
from nanolib.meters.time.timer import KINDS
from nanolib.meters.time.turns import Round, speed_up_row
from nanolib.models.attention.traffic import Traffic
from nanolib.stats.intervals import mean_interval

Flags = tuple[Flag, ...]
Answers = Sequence[Mapping[str, Any]]  # one per rank
_SLOWEST = "perf_counter, slowest rank"
_PROTOCOL = (
    "TCP/IP headers of 66 B per segment of up to 64 KiB, acknowledgements, gloo's own messages"
)


def traffic_words(sent: Mapping[str, Traffic]) -> dict[str, str]:
    """Each algorithm's rounds, and the bytes of the rank that sends most."""
    return {
        "rounds": ", ".join(f"{form} {traffic.rounds}" for form, traffic in sent.items()),
        "bytes sent per rank": ", ".join(
            f"{form} {max(traffic.sent):,.0f}" for form, traffic in sent.items()
        ),
    }


def slowest(ranks: Sequence[Sequence[float]]) -> np.ndarray:
    """Take the longest time of any rank in each block; `ranks` has shape [ranks][blocks]."""
    return np.asarray(ranks, dtype=float).max(axis=0)


def latency_row(
    ranks: Sequence[Sequence[float]], scope: str, flags: Flags, **details: Any
) -> Measurement:
    """Make the `latency` of a call that all ranks make together."""
    row = summarise(slowest(ranks), scope=scope, method=_SLOWEST, details=details)
    return replace(row, flags=(*row.flags, *flags))


def rounds_of(answers: Answers) -> list[Round]:
    """Make the rounds of a launch from each rank's `blocks` and `busy`."""
    longest = {
        name: slowest([answer["blocks"][name] for answer in answers])
        for name in answers[0]["blocks"]
    }
    busy = np.any([answer["busy"] for answer in answers], axis=0)
    return [
        Round({name: series[at : at + 1] for name, series in longest.items()}, bool(is_busy))
        for at, is_busy in enumerate(busy)
    ]


def speed_up_rows(
    rounds: Sequence[Round], name: str, others: Iterable[str], flags: Flags
) -> Iterator[Measurement]:
    """Compare a call with each other call of its rounds; too few rounds give no row."""
    for other in others:
        if other == name:
            continue
        row = speed_up_row(rounds, name, other, scope=f"{name}{OVER}{other}")
        if row is not None:
            yield replace(row, flags=(*row.flags, *flags))


def algorithm_rows(
    answers: Answers,
    form: str,
    flags: Flags,
    traffic: Traffic | None,
    predicted_ms: float | None = None,
) -> Iterator[Measurement]:
    """Make an algorithm's rows other than times of whole calls: traffic, parts and error.

    Args:
        answers: With `bytes`, `parts` and `errors` by algorithm.
        form: The algorithm.
        flags: For what was timed or counted.
        traffic: What it sends by formula; None if it sends nothing.
        predicted_ms: What the cost model predicts for the communication.
    """
    if traffic:
        yield exact("rounds", traffic.rounds, scope=form)
        yield from bytes_rows(form, traffic.sent, answers[0]["bytes"].get(form), flags)
    yield from part_rows([answer["parts"][form] for answer in answers], form, flags, predicted_ms)
    errors = [answer["errors"][form] for answer in answers if form in answer["errors"]]
    if errors:
        error, n = max(errors), len(errors)
        yield Measurement("relative_error", error, n=n, method="float64", scope=form)


def part_rows(
    ranks: Sequence[Sequence[Mapping[str, float]]],
    form: str,
    flags: Flags,
    predicted_ms: float | None,
) -> Iterator[Measurement]:
    """Make `part_time` of each block and of compute, wait and communication, and `time_share`.

    Args:
        ranks: Milliseconds by block, shape [ranks][runs].
        form: What was called.
        flags: For every row.
        predicted_ms: What the cost model predicts for the communication.
    """
    blocks = dict.fromkeys(name for runs in ranks for run in runs for name in run)
    kinds = KINDS.values()
    parts = {
        name: [[run.get(name, 0.0) for run in runs] for runs in ranks]
        for name in blocks
        if name not in kinds
    }
    parts |= {kind: [[_of_kind(run, kind) for run in runs] for runs in ranks] for kind in kinds}
    for name, series in parts.items():
        longest = slowest(series)
        low, estimate, high, confidence = interval_of(longest)
        yield Measurement(
            "part_time",
            estimate,
            low,
            high,
            confidence,
            n=len(longest),
            samples=tuple(map(float, longest)),
            predicted=predicted_ms if name == "communication" else None,
            method=_SLOWEST,
            scope=f"{form}: {name}",
            flags=flags,
            details={
                "ranks": [
                    {"mean": float(np.mean(s)), "sd": float(np.std(s, ddof=1))} for s in series
                ]
            },
        )
    # The rank that the others wait for is the one whose time the call takes.
    rank = int(np.argmin([np.sum(waits) for waits in parts["wait"]]))
    own = np.array([parts[kind][rank] for kind in kinds])
    for kind, share in zip(kinds, own / own.sum(axis=0), strict=True):
        low, estimate, high = mean_interval(share)
        yield Measurement(
            "time_share",
            estimate,
            max(low, 0.0),  # Student's interval does not know that it is of a share
            min(high, 1.0),
            0.95,
            n=len(share),
            method="one rank's own time",
            scope=f"{form}: {kind}",
            flags=flags,
            details={"rank": rank},
        )


def _of_kind(run: Mapping[str, float], kind: str) -> float:
    return sum(ms for name, ms in run.items() if KINDS.get(name.split("_")[0]) == kind)


def bytes_rows(
    form: str, sent: Sequence[float], counted: float | None, flags: Flags
) -> Iterator[Measurement]:
    """Make `wire_bytes` per rank: by formula, and as the interface counted them if it could."""
    mean = sum(sent) / len(sent)
    yield exact("wire_bytes", mean, scope=form, details={"most": max(sent), "all": sum(sent)})
    if counted is not None:
        yield Measurement(
            "wire_bytes",
            counted / len(sent),
            n=1,
            predicted=mean,
            method="interface",
            scope=form,
            flags=flags,
            details={"includes": _PROTOCOL},
        )
