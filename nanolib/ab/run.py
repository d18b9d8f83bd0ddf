"""Compare two versions of the code, and turn the block times into findings and database rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nanolib.ab.pairs import Settings, Task, TaskResult
from nanolib.ab.schedule import Log, compare_versions
from nanolib.ab.spec import Spec
from nanolib.ab.versions import Version, checked_out
from nanolib.compare.findings import (
    CHANGED,
    FAILED,
    NEW,
    Comparison,
    Line,
    case_names,
    worst_first,
)
from nanolib.compare.runs import figure_lines
from nanolib.measurement import BadInput, Measurement, Status
from nanolib.run.lock import device_lock
from nanolib.stats.compare import Kind
from nanolib.store.schema import Run


@dataclass(frozen=True)
class AbResult:
    """The result of a comparison.

    Attributes:
        comparison: Findings of all tasks.
        versions: The two versions, A and B.
        results: Block times and verdicts of each task.
    """

    comparison: Comparison
    versions: tuple[Version, Version]
    results: tuple[TaskResult, ...]


def run_ab(
    spec: Spec,
    settings: Settings,
    log: Log,
    agree: Callable[[float], None],
) -> AbResult:
    """Compare two versions, then end their processes and remove their worktrees.

    Args:
        spec: What to compare.
        settings: How to compare the versions.
        log: Function that receives one line of progress at a time.
        agree: Function that receives the maximum duration, s, before the measurement starts. An
            exception from the function stops the comparison.

    Raises:
        BadInput: A revision does not exist, or a version's code cannot be imported. The versions
            have no timed case in common, or the working tree changed during the comparison.
    """
    with checked_out(spec.names, spec.start) as found:
        versions = spec.with_interpreters(found)
        before = [version.written() for version in versions]
        tasks, lines = spec.tasks(versions, settings.timeout_s)
        share_s = min(settings.budget_s, settings.total_s / len(tasks))
        settings = replace(settings, budget_s=share_s)
        a, b = spec.titles_of(versions)
        seconds = len(tasks) * share_s
        duration = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        log(f"A is {a}, B is {b}; {len(tasks)} case(s), at most {duration}")
        agree(seconds)
        with device_lock(tasks[0].device, f"ab {spec.names[0]} {spec.names[1]}", log):
            results = compare_versions(versions, tasks, settings, log)
        if before != [version.written() for version in versions]:
            raise BadInput(
                "revision: files of the working tree were edited during the measurement; "
                "run nano ab again"
            )
    names = case_names(("", task.experiment, task.case_id, task.factors) for task in tasks)
    for result in results:
        case = names["", result.task.experiment, result.task.case_id]
        found = lines_of(result, spec.metric, settings)
        lines += [replace(line, case=case) for line in found]
    comparison = Comparison(worst_first(lines), True, settings.threshold, differ=spec.differences)
    return AbResult(comparison, (versions[0], versions[1]), tuple(results))


def lines_of(result: TaskResult, metric: str, settings: Settings) -> list[Line]:
    """Return the findings of one task.

    Args:
        result: The task with its block times and verdicts.
        metric: Name of the metric to compare.
        settings: How the versions were compared.
    """
    task = result.task

    def line(finding: str, name: str = "", message: str = "", **values: Any) -> Line:
        return Line(task.experiment, task.case, name, finding, message=message, **values)

    if result.failures:
        a_ok, b_ok = (status == Status.OK for status, _ in result.endings)
        finding = FAILED if a_ok else NEW if b_ok else Kind.INCONCLUSIVE
        return [line(finding, message=result.failures)]
    of_a, of_b = (_figures(task, rows) for rows in result.rows)
    lines = [
        each
        for each in figure_lines(of_a, of_b, settings.threshold)
        if each.finding == CHANGED or each.metric.split()[0] == metric
    ]
    if metric != "latency":
        return lines or [line(Kind.INCONCLUSIVE, metric, "the case does not measure this metric")]
    for scope, pairs in result.blocks.items():
        verdict = result.verdicts.get(scope)
        kind, message = Kind.INCONCLUSIVE, f"{pairs} are too few; raise --budget"
        if verdict:
            kind = verdict.kind
            is_few = kind == Kind.SUSPECT and not pairs.by_process
            advice = "raise --budget" if is_few else ""
            message = "; ".join(filter(None, [verdict.open, result.notes, str(pairs), advice]))
        base = float(np.median(pairs.a))
        # Slow pairs move the medians of both versions, so B's time follows from the verdict's ratio.
        current = base * verdict.ratio if verdict else float(np.median(pairs.b))
        ends = {"base": base, "current": current}
        lines.append(line(kind, f"{metric} {scope}".strip(), message, verdict=verdict, **ends))
    return lines or [line(Kind.INCONCLUSIVE, message="the case has no timed calls")]


def _figures(task: Task, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Any]:
    """Return the rows of one version by metric, scope and method, for `figure_lines`."""
    shared = {"experiment": task.experiment, "factors": task.factors}
    return {
        (row["metric"], row["scope"], row["method"]): row | shared
        for row in rows
        if row["estimate"] is not None
    }


def to_run(result: AbResult, spec: Spec, label: str) -> Run:
    """Return a run for the database, with one `ratio` row per case and scope.

    Args:
        result: Result of the comparison.
        spec: What was compared.
        label: The user's name for the run.
    """
    from nanolib.meters.machine import this_machine, versions

    titles = dict(zip("ab", spec.titles_of(result.versions), strict=True))
    rows = {}
    for one in result.results:
        measured = list(_ratio_rows(one, titles))
        status = Status.OK if measured and not one.failures else Status.ERROR
        ending = Measurement("case_duration", status=status, message=one.failures)
        factors = {"experiment": one.task.experiment, **one.task.factors}
        rows[one.task.case_id] = factors, [ending, *measured]
    params = {"differ": spec.differences, "metric": spec.metric, "functions": [*spec.functions]}
    return Run(
        "ab",
        this_machine().to_dict(),
        titles | params,
        label=label,
        device=result.results[0].task.device,
        versions=versions(),
        git_revision=result.versions[1].revision,
        rows=rows,
    )


def _ratio_rows(result: TaskResult, titles: Mapping[str, str]) -> Iterator[Measurement]:
    """Yield the ratio of B's time to A's time, for each scope that has a verdict."""
    for scope, verdict in result.verdicts.items():
        pairs = result.blocks[scope]
        low, ratio, high = verdict.interval
        details = {
            "kind": verdict.kind,
            "p": verdict.p,
            "threshold": verdict.threshold,
            "minimum_detectable_effect": verdict.minimum_detectable_effect,
            "generations": pairs.generations,
            "base_ms": pairs.a,
            "current_ms": pairs.b,
        }
        yield Measurement(
            "ratio",
            ratio,
            low,
            high,
            0.95,
            len(pairs.a),
            samples=tuple(np.divide(pairs.b, pairs.a).tolist()),
            method="interleaved pairs",
            scope=scope,
            details=titles | details,
        )
