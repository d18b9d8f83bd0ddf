"""Compare two versions of the code, and turn the block times into findings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanolib.ab.pairs import Settings, Task, TaskResult
from nanolib.ab.schedule import Log, compare_versions
from nanolib.ab.spec import Spec
from nanolib.ab.versions import checked_out
from nanolib.compare.findings import FAILED, NEW, Comparison, Line, case_names, worst_first
from nanolib.compare.runs import figure_lines
from nanolib.measurement import BadInput, Status
from nanolib.run.lock import device_lock
from nanolib.stats.compare import Kind


def run_ab(
    spec: Spec,
    settings: Settings,
    log: Log,
    agree: Callable[[float], None],
) -> Comparison:
    """Compare two versions, then end their processes and remove their worktrees.

    Args:
        spec: What to compare.
        settings: How to compare the versions.
        log: Function that receives one line of progress at a time.
        agree: Function that receives the maximum duration, s, before the measurement starts. An
            exception from the function stops the comparison.

    Returns:
        Findings of all cases and functions.

    Raises:
        BadInput: A revision does not exist, or a version's code cannot be imported. The versions
            have no timed case in common, or the working tree changed during the comparison.
    """
    with checked_out(spec.names, spec.start) as found:
        versions = spec.with_interpreters(found)
        before = [version.edits() for version in versions]
        tasks, lines = spec.tasks(versions)
        share_s = min(settings.budget_s, settings.total_s / len(tasks))
        settings = replace(settings, budget_s=share_s)
        a, b = (version.title for version in versions)
        seconds = len(tasks) * share_s
        duration = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        log(f"A is {a}, B is {b}; {len(tasks)} case(s), at most {duration}")
        agree(seconds)
        with device_lock(tasks[0].device, f"ab {spec.names[0]} {spec.names[1]}", log):
            results = compare_versions(versions, tasks, settings, log)
        if before != [version.edits() for version in versions]:
            raise BadInput(
                "revision: files of the working tree were edited during the measurement; "
                "run nano ab again"
            )
    names = case_names(("", task.experiment, task.case_id, task.factors) for task in tasks)
    for result in results:
        case = names["", result.task.experiment, result.task.case_id]
        lines += [replace(line, case=case) for line in lines_of(result, settings.threshold)]
    return Comparison(worst_first(lines), True, settings.threshold, differ=spec.differences)


def lines_of(result: TaskResult, threshold: float) -> list[Line]:
    """Return the findings of one task: its timings, and each counted metric that changed.

    Args:
        result: The task with its block times and verdicts.
        threshold: Smallest change of counted memory that is a regression, as a fraction.
    """
    task = result.task

    def line(finding: str, name: str = "", message: str = "", **values: Any) -> Line:
        return Line(task.experiment, task.case, name, finding, message=message, **values)

    if result.failures:
        a_ok, b_ok = (status == Status.OK for status, _ in result.endings)
        finding = FAILED if a_ok else NEW if b_ok else Kind.INCONCLUSIVE
        return [line(finding, message=result.failures)]
    of_a, of_b = (_figures(task, rows) for rows in result.rows)
    counted = figure_lines(of_a, of_b, threshold)
    lines = [one for one in counted if one.finding != Kind.EQUIVALENT]
    if not result.blocks:
        lines.append(line(Kind.INCONCLUSIVE, message="the case has no timed calls"))
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
        levels = {"base": base, "current": current}
        lines.append(line(kind, f"latency {scope}".strip(), message, verdict=verdict, **levels))
    return lines


def _figures(task: Task, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], Any]:
    """Return the rows of one version by metric, scope and method, for `figure_lines`."""
    shared = {"experiment": task.experiment, "factors": task.factors}
    return {
        (row["metric"], row["scope"], row["method"]): row | shared
        for row in rows
        if row["estimate"] is not None
    }
