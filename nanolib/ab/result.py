"""Turn block times into findings, in the words of `nano compare`, and into rows for the database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from nanolib.ab.pairs import Compared, Pairs, Settings, Task, device_of
from nanolib.ab.spec import Spec
from nanolib.ab.worktree import Version
from nanolib.compare.findings import CHANGED, FAILED, NEW, Comparison, Line
from nanolib.compare.history import TIMED
from nanolib.compare.runs import exact_lines
from nanolib.measurement import Direction, Measurement, Status
from nanolib.stats.compare import Kind, Verdict, paired_levels
from nanolib.store.schema import Run

EXPERIMENT = "ab"


@dataclass(frozen=True)
class AbResult:
    """What a comparison gave.

    Attributes:
        comparison: The findings.
        versions: A and B.
        compared: The block times behind the findings.
    """

    comparison: Comparison
    versions: tuple[Version, Version]
    compared: tuple[Compared, ...]


def lines_of(one: Compared, metric: str, settings: Settings) -> list[Line]:
    """The findings of one task.

    Args:
        one: The task with its block times.
        metric: What is compared.
        settings: How it was compared.
    """
    task, result = one.task, one.result

    def line(finding: str, name: str = "", message: str = "", **values: Any) -> Line:
        return Line(task.experiment, task.case, name, finding, message=message, **values)

    a_ok, b_ok = (status == Status.OK for status, _ in result.endings)
    if not (a_ok and b_ok):
        finding = FAILED if a_ok else NEW if b_ok else Kind.INCONCLUSIVE
        return [line(finding, message=result.failures)]
    frames = [_frame(task, rows) for rows in result.rows]
    exact = list(exact_lines(*frames, settings.threshold)) if all(map(len, frames)) else []
    lines = [each for each in exact if each.finding == CHANGED or each.metric.split()[0] == metric]
    if metric not in TIMED:
        return lines or [line(Kind.INCONCLUSIVE, metric, "the case has no such figure")]
    for scope, pairs in result.blocks.items():
        verdict = one.verdicts.get(scope)
        base, current = _levels(pairs, verdict, metric)
        if verdict is None:
            kind, message = Kind.INCONCLUSIVE, f"{pairs} are too few; raise --budget"
        else:
            notes = filter(None, [verdict.open, _notes(one), str(pairs)])
            kind, message = verdict.kind, "; ".join(notes)
        name = f"{metric} {scope}".strip()
        lines.append(line(kind, name, message, base=base, current=current, verdict=verdict))
    return lines or [line(Kind.INCONCLUSIVE, message="the case times nothing")]


def _levels(
    pairs: Pairs, verdict: Verdict | None, metric: str
) -> tuple[float | None, float | None]:
    """Block times of A and B, ms, whose ratio is the verdict's. A rate has none: its work is the version's own."""
    if metric != "latency":
        return None, None
    if verdict is None:
        return float(np.median(pairs.a)), float(np.median(pairs.b))
    return paired_levels(pairs.a, pairs.b, verdict.ratio)


def _notes(one: Compared) -> str:
    """Messages of versions that ended well."""
    endings = zip("AB", one.result.endings, strict=True)
    return "; ".join(f"{name}: {said}" for name, (_, said) in endings if said)


def _frame(task: Task, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows that a version made by itself, as the store would return them."""
    shared = {
        "experiment": task.experiment,
        "case_id": task.case_id,
        "factors": task.factors,
        "run_id": "",
    }
    return pd.DataFrame([{**row, **shared} for row in rows if row["estimate"] is not None])


def to_run(result: AbResult, spec: Spec, label: str = "") -> Run:
    """A run with one `ratio` row per case and timing, for the database and the report.

    Args:
        result: What came out.
        spec: What was compared.
        label: The user's name for it.
    """
    from nanolib.meters.machine import this_machine, versions

    titles = dict(zip("ab", spec.titles_of(result.versions), strict=True))
    rows = {}
    for one in result.compared:
        measured = list(_ratio_rows(one, spec.metric, titles))
        status = Status.OK if measured and one.result.fine else Status.ERROR
        ending = Measurement("case_time", status=status, message=one.result.failures)
        factors = {"experiment": one.task.experiment, **one.task.factors}
        rows[one.task.case_id] = factors, [ending, *measured]
    params = titles | {
        "differ": spec.differences,
        "metric": spec.metric,
        "functions": list(spec.functions),
    }
    return Run(
        EXPERIMENT,
        this_machine().to_dict(),
        params,
        label=label,
        device=device_of(result.compared[0].task),
        versions=versions(),
        git_revision=result.versions[1].revision,
        rows=rows,
    )


def _ratio_rows(one: Compared, metric: str, titles: Mapping[str, str]) -> Iterator[Measurement]:
    """Time of B over time of A, for each scope that has a verdict."""
    for scope, verdict in one.verdicts.items():
        pairs = one.result.blocks[scope]
        low, ratio, high = verdict.interval
        if verdict.direction is Direction.HIGHER:  # the ratio of a rate is the other way round
            low, ratio, high = 1 / high, 1 / ratio, 1 / low
        yield Measurement(
            "ratio",
            ratio,
            low,
            high,
            0.95,
            len(pairs.a),
            samples=tuple(b / a for a, b in zip(pairs.a, pairs.b, strict=True)),
            method="interleaved pairs",
            scope=scope,
            details={
                **titles,
                "metric": metric,
                "kind": verdict.kind,
                "p": verdict.p,
                "threshold": verdict.threshold,
                "minimum_detectable_effect": verdict.minimum_detectable_effect,
                "generations": pairs.generations,
                "base_ms": pairs.a,
                "current_ms": pairs.b,
            },
        )
