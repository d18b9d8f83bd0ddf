"""Define what `nano ab` compares, compare two versions, and turn block times into findings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanolib.ab.children import VersionDied, VersionProcess
from nanolib.ab.pairs import CALL, Request, Settings, Task, TaskResult
from nanolib.ab.processes import Processes
from nanolib.ab.schedule import Log, ask_both, compare_versions
from nanolib.ab.versions import HERE, Interpreter, Version, checked_out
from nanolib.compare.findings import (
    FAILED,
    MISSING,
    NEW,
    Comparison,
    Line,
    case_name,
    case_names,
    describe_differences,
    worst_first,
)
from nanolib.compare.runs import Figures, Row, figure_lines
from nanolib.measurement import BadInput, Status
from nanolib.run.process import device_lock
from nanolib.stats.compare import Kind

Cases = dict[str, Mapping[str, Any]]  # id → factors


@dataclass(frozen=True)
class Spec:
    """The subject of a comparison: versions, and cases or functions.

    Attributes:
        names: Git revisions of A and B, or `.` for the working tree.
        start: A folder of the repository.
        jobs: Name of each experiment, with its parameters.
        functions: Functions to time, each as `package.module:function`.
        setup: Function that creates the argument of each timed function. An empty text means that
            timed functions take no argument.
        interpreters: Interpreters of A and B, by default this interpreter for both versions.
    """

    names: tuple[str, str]
    start: Path
    jobs: Sequence[tuple[str, Mapping[str, Any]]] = ()
    functions: Sequence[str] = ()
    setup: str = ""
    interpreters: tuple[Interpreter, Interpreter] = (HERE, HERE)

    def tasks(self, versions: Sequence[Version]) -> tuple[list[Task], list[Line]]:
        """Return the tasks that both versions have, and a finding for every other case.

        Args:
            versions: The two versions, A and B, with their files.

        Raises:
            BadInput: A version cannot list its cases, or the versions have no timed case in common.
        """
        tasks, lines = [], []
        for name in self.functions:
            request = {"do": "function", "function": name, "setup": self.setup}
            tasks.append(Task(CALL, name, {"name": name}, request))
        with Processes(versions, fork=False) as sides:
            for experiment, params in self.jobs:
                request = {"experiment": experiment, "params": dict(params)}
                of_a, of_b = _list_cases(sides.processes or sides.renew(), request)
                for case_id, factors in (of_a | of_b).items():
                    if case_id in of_a and case_id in of_b:
                        of_case = request | {"do": "case", "case_id": case_id}
                        tasks.append(Task(experiment, case_id, factors, of_case))
                        continue
                    finding, without = (MISSING, "B") if case_id in of_a else (NEW, "A")
                    message = f"{without} does not have this case"
                    lines.append(Line(experiment, case_name(factors), "", finding, message=message))
        if not tasks:
            raise BadInput(
                "ab: the two versions have no timed case in common; "
                "name another notebook or other parameters"
            )
        return tasks, lines


def _list_cases(processes: Sequence[VersionProcess], request: Request) -> list[Cases]:
    """Return the cases that A and B can time."""
    try:
        answers = ask_both(processes, request | {"do": "cases"})
    except VersionDied as death:
        raise BadInput(f"{death.process.version.title}: {death}") from None
    for process, answer in zip(processes, answers, strict=True):
        if "cases" not in answer:
            raise BadInput(f"{process.version.title}: {answer['message']}")
    return [answer["cases"] for answer in answers]


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
        versions = [
            replace(version, python=interpreter.python)
            for version, interpreter in zip(found, spec.interpreters, strict=True)
        ]
        before = [version.edits() for version in versions]
        tasks, lines = spec.tasks(versions)
        share_s = min(settings.budget_s, settings.total_s / len(tasks))
        settings = replace(settings, budget_s=share_s)
        a, b = (version.title for version in versions)
        seconds = len(tasks) * share_s
        duration = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        log(f"A is {a}, B is {b}; {len(tasks)} case(s), at most {duration} and start-up")
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
        lines += lines_of(result, case, settings.threshold)
    differ = describe_differences(*(interpreter.packages for interpreter in spec.interpreters))
    return Comparison(worst_first(lines), True, settings.threshold, differ=differ)


def lines_of(result: TaskResult, case: str, threshold: float) -> list[Line]:
    """Return the findings of one task: its timings, and each counted metric that changed.

    Args:
        result: The task with its block times and verdicts.
        case: Name of the task's case.
        threshold: Smallest change of counted memory that is a regression, as a fraction.
    """
    task = result.task

    def line(finding: str, name: str = "", message: str = "", **values) -> Line:
        return Line(task.experiment, case, name, finding, message=message, **values)

    if result.failures:
        a_ok, b_ok = (status == Status.OK for status, _ in result.endings)
        finding = FAILED if a_ok else NEW if b_ok else Kind.INCONCLUSIVE
        return [line(finding, message=result.failures)]
    counted = figure_lines(*map(_figures, result.rows), threshold)
    lines = [
        replace(line, experiment=task.experiment, case=case)
        for line in counted
        if line.finding != Kind.EQUIVALENT
    ]
    if not result.blocks:
        lines.append(line(Kind.INCONCLUSIVE, message="the case has no timed calls"))
    for scope, pairs in result.blocks.items():
        verdict = result.verdicts.get(scope)
        kind, message = Kind.INCONCLUSIVE, f"{pairs} are too few; raise --budget"
        if verdict:
            kind = verdict.kind
            advice = "" if kind != Kind.SUSPECT or pairs.counts_processes else "raise --budget"
            message = "; ".join(filter(None, [verdict.open, result.notes, str(pairs), advice]))
        base = float(np.median(pairs.a))
        # Slow pairs move both medians, so B's time follows from the verdict's ratio.
        current = base * verdict.ratio if verdict else float(np.median(pairs.b))
        name = f"latency {scope}".strip()
        lines.append(line(kind, name, message, verdict=verdict, base=base, current=current))
    return lines


def _figures(rows: Sequence[Row]) -> Figures:
    """Return the rows of one version by metric, scope and method, for `figure_lines`."""
    return {
        (row["metric"], row["scope"], row["method"]): row
        for row in rows
        if row["estimate"] is not None
    }
