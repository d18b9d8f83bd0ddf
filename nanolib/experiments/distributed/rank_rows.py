"""What the ranks saw, as rows: a call takes as long as on its slowest rank; shares are of one rank's own time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanolib.measurement import OVER, Flag, Measurement, exact
from nanolib.meters.time.latency import summarise
from nanolib.meters.time.timer import KINDS
from nanolib.meters.time.turns import Round, speed_up_row
from nanolib.models.attention.traffic import Traffic
from nanolib.stats.intervals import (
    Interval,
    TooFewSamples,
    mean_interval,
    median_interval,
    range_confidence,
)

Parts = Sequence[Sequence[dict[str, float]]]  # [ranks][runs]: block → ms


def traffic_words(sent: Mapping[str, Traffic]) -> dict[str, str]:
    """Rounds, and bytes of the rank that sends most, of each form."""
    return {
        "rounds": ", ".join(f"{form} {traffic.rounds}" for form, traffic in sent.items()),
        "bytes sent per rank": ", ".join(
            f"{form} {max(traffic.sent):,.0f}" for form, traffic in sent.items()
        ),
    }


def slowest(ranks: Sequence[Sequence[float]]) -> np.ndarray:
    """Of each block the longest time of any rank; ranks × blocks."""
    return np.asarray(ranks, dtype=float).max(axis=0)


def latency_row(
    ranks: Sequence[Sequence[float]], scope: str, flags: tuple[Flag, ...], **details: Any
) -> Measurement:
    """The `latency` of a call that all ranks make together."""
    row = summarise(
        slowest(ranks), scope=scope, method="perf_counter, slowest rank", details=details
    )
    return Measurement.from_dict(row.to_dict() | {"flags": [*row.flags, *flags]})


def rounds_of(answers: Sequence[Mapping[str, Any]]) -> list[Round]:
    """The rounds of a launch, from each rank's `blocks` and `busy`: a call takes as long as on its slowest rank."""
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
    rounds: Sequence[Round], name: str, others: Iterable[str], flags: tuple[Flag, ...]
) -> Iterator[Measurement]:
    """How many times as fast a call is as each of the others of its rounds; nothing where these are too few."""
    for other in others:
        row = (
            speed_up_row(rounds, name, other, scope=f"{name}{OVER}{other}")
            if other != name
            else None
        )
        if row is not None:
            yield replace(row, flags=(*row.flags, *flags))


def part_rows(
    ranks: Parts, form: str, flags: tuple[Flag, ...], predicted_ms: float | None
) -> Iterator[Measurement]:
    """`part_time` of each block and of compute, wait and communication; `time_share` of the latter.

    Args:
        ranks: Milliseconds.
        form: What was called.
        flags: For every row.
        predicted_ms: What the cost model says of the communication.
    """
    names = dict.fromkeys(
        name for runs in ranks for run in runs for name in run if name not in KINDS.values()
    )
    blocks = {name: [[run.get(name, 0.0) for run in runs] for runs in ranks] for name in names}
    kinds = {
        kind: [[_of_kind(run, kind) for run in runs] for runs in ranks] for kind in KINDS.values()
    }
    for name, series in (*blocks.items(), *kinds.items()):
        yield _part(
            series, f"{form}: {name}", flags, predicted_ms if name == "communication" else None
        )
    # The rank that the others wait for is the one whose time the call takes.
    rank = int(np.argmin([np.sum(waits) for waits in kinds["wait"]]))
    own = np.array([series[rank] for series in kinds.values()])
    for kind, share in zip(kinds, own / own.sum(axis=0), strict=True):
        low, estimate, high = _mean(share)
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


def _of_kind(run: dict[str, float], kind: str) -> float:
    return sum(ms for name, ms in run.items() if KINDS.get(name.split("_")[0]) == kind)


def _part(
    series: Sequence[Sequence[float]], scope: str, flags: tuple[Flag, ...], predicted: float | None
) -> Measurement:
    longest, confidence = slowest(series), 0.95
    try:
        low, estimate, high = median_interval(longest)
    except TooFewSamples:
        low, estimate, high = float(longest.min()), float(np.median(longest)), float(longest.max())
        confidence = range_confidence(len(longest))
    each = [
        {"mean": float(np.mean(s)), "sd": float(np.std(s, ddof=1)) if len(s) > 1 else 0.0}
        for s in series
    ]
    return Measurement(
        "part_time",
        estimate,
        low,
        high,
        confidence,
        n=len(longest),
        samples=tuple(map(float, longest)),
        predicted=predicted,
        method="perf_counter, slowest rank",
        scope=scope,
        flags=flags,
        details={"ranks": each},
    )


def _mean(values: np.ndarray) -> Interval:
    try:
        return mean_interval(values)
    except TooFewSamples:
        return Interval(float(values.min()), float(values.mean()), float(values.max()))


def bytes_rows(
    form: str, sent: Sequence[float], counted: float | None, flags: tuple[Flag, ...]
) -> Iterator[Measurement]:
    """`wire_bytes` per rank by formula, and as the interface counted them where it could."""
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
            details={
                "includes": "TCP/IP headers of 66 B per segment of up to 64 KiB, acknowledgements, gloo's own messages"
            },
        )
