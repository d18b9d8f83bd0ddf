"""`nano ab`: what is to be compared, in which versions, and the findings in the words of `nano compare`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nanolib.ab.client import VersionDied, VersionProcess
from nanolib.ab.environment import Environment, differences, titles
from nanolib.ab.rounds import CALL, Compared, Log, Settings, Task, compare_versions, device_of
from nanolib.ab.worktree import Version, checked_out
from nanolib.compare.compare import (
    BROKE,
    CHANGED,
    COUNTED,
    NEW,
    VANISHED,
    Comparison,
    Line,
    exact_lines,
)
from nanolib.compare.history import TIMED
from nanolib.measurement import BadInput, Direction, Measurement, Status, case_name
from nanolib.run.lock import device_lock
from nanolib.stats.compare import Kind, Verdict, paired_levels
from nanolib.store.schema import Run

EXPERIMENT = "ab"


@dataclass(frozen=True)
class Question:
    """What `nano ab` compares.

    Attributes:
        names: Git revisions of A and B, or `.` for the working tree.
        start: A folder of the repository.
        jobs: Experiments, each with the parameters for A and for B.
        functions: Functions `package.module:function`, called without arguments.
        setup: A function whose result they are called with instead; empty for none.
        metric: What is compared.
        titles: What A and B are called where `names` do not tell them apart.
        environments: The interpreters of A and B, where they are two.
    """

    names: tuple[str, str]
    start: Path
    jobs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = ()
    functions: Sequence[str] = ()
    setup: str = ""
    metric: str = "latency"
    titles: tuple[str, str] = ("", "")
    environments: tuple[Environment, Environment] | None = None

    def __post_init__(self) -> None:
        allowed = (*TIMED, *COUNTED)
        if self.metric not in allowed:
            raise BadInput(
                f"--metric: {self.metric!r} cannot be compared so; use one of {', '.join(allowed)}"
            )
        for environment in self.environments or ():
            if self.jobs and (lacking := environment.lacks("nanolib")):
                raise BadInput(
                    f"{environment.python}: it lacks {', '.join(lacking)}; install what nanolib needs there"
                )
        for name in (*self.functions, *([self.setup] if self.setup else [])):
            module, colon, function = name.partition(":")
            if not (colon and module and function):
                raise BadInput(f"--call: {name!r} names no function; write package.module:function")

    def named(self, versions: Sequence[Version]) -> list[str]:
        """A and B as people read them."""
        return [
            title or version.title for title, version in zip(self.titles, versions, strict=True)
        ]

    @property
    def differ(self) -> list[str]:
        """What differs between the environments, for people."""
        return (
            [f"{name} {a} → {b}" for name, a, b in differences(*self.environments)]
            if self.environments
            else []
        )

    def run_by(self, versions: Sequence[Version]) -> list[Version]:
        """The versions, each with its interpreter."""
        if self.environments is None:
            return list(versions)
        told = zip(versions, self.environments, titles(*self.environments), strict=True)
        return [
            replace(version, python=each.python, environment=title) for version, each, title in told
        ]


@dataclass(frozen=True)
class Answer:
    """What came out.

    Attributes:
        comparison: The findings.
        versions: A and B.
        compared: The block times behind the findings.
    """

    comparison: Comparison
    versions: tuple[Version, Version]
    compared: tuple[Compared, ...]


def ask(question: Question, settings: Settings, log: Log = lambda _: None) -> Answer:
    """Compare two versions; their worktrees and processes are gone when this returns, however it does.

    Args:
        question: What.
        settings: How.
        log: Told in one line each what is going on.

    Raises:
        BadInput: Revisions that do not exist, cannot be imported or hold nothing in common, or a working tree that was
            edited meanwhile.
    """
    with checked_out(question.names, question.start) as found:
        versions = question.run_by(found)
        before = [_sources(version) for version in versions]
        tasks, lines = _tasks(question, versions, settings)
        titles = question.named(versions)
        if settings.total_s is not None and tasks:
            settings = replace(
                settings, budget_s=min(settings.budget_s, settings.total_s / len(tasks))
            )
        seconds = len(tasks) * settings.budget_s
        most = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        log(f"A is {titles[0]}, B is {titles[1]}; {len(tasks)} case(s), at most {most}")
        if not tasks:
            return Answer(
                Comparison.of(lines, True, settings.threshold), (versions[0], versions[1]), ()
            )
        with device_lock(device_of(tasks[0]), f"ab {question.names[0]} {question.names[1]}", log):
            compared = compare_versions(versions, tasks, settings, log)
        if before != [_sources(version) for version in versions]:
            raise BadInput(
                "revision: files of the working tree were edited while it was measured; run it again"
            )
    for one in compared:
        lines += _lines(one, question.metric, settings)
    comparison = Comparison.of(lines, True, settings.threshold, differ=question.differ)
    return Answer(comparison, (versions[0], versions[1]), tuple(compared))


def _sources(version: Version) -> str:
    """A digest of when the version's Python files were last written."""
    stats = [(str(file), file.stat().st_mtime_ns) for file in version.python_files()]
    return hashlib.sha256(repr(sorted(stats)).encode()).hexdigest()


def _tasks(
    question: Question, versions: Sequence[Version], settings: Settings
) -> tuple[list[Task], list[Line]]:
    """What both versions have, and what only one of them has."""
    tasks = [
        Task(
            CALL, hashlib.sha256(name.encode()).hexdigest()[:16], {"name": name}, (request, request)
        )
        for name in question.functions
        for request in [{"do": "function", "function": name, "setup": question.setup}]
    ]
    lines: list[Line] = []
    asked = []
    for experiment, *params in question.jobs:
        requests = [
            {"do": "case", "experiment": experiment, "params": dict(values)} for values in params
        ]
        asked.append((experiment, requests))
    if asked:
        with (
            VersionProcess(versions[0], settings.timeout_s) as a,
            VersionProcess(versions[1], settings.timeout_s) as b,
        ):
            for experiment, requests in asked:
                for side, request in zip((a, b), requests, strict=True):
                    side.send(**request | {"do": "cases"})
                listed = [_listed(side) for side in (a, b)]
                more, only = _paired(experiment, requests, listed)
                tasks += more
                lines += only
    if not tasks:
        raise BadInput(
            "ab: the two have no case in common that can be timed; name another notebook or other parameters"
        )
    return tasks, lines


def _listed(side: VersionProcess) -> list[dict[str, Any]]:
    """The cases of one side."""
    try:
        answer = side.receive()
    except VersionDied as death:
        raise BadInput(f"{side.version.called}: {death}") from None
    if "cases" not in answer:
        raise BadInput(f"{side.version.called}: {answer['message']}")
    return answer["cases"]


def _paired(
    experiment: str, requests: Sequence[Mapping[str, Any]], listed: Sequence[list[dict[str, Any]]]
) -> tuple[list[Task], list[Line]]:
    """Cases of A and B that belong together: by their id, or under different parameters by their place."""
    if requests[0] != requests[1]:
        if len(listed[0]) != len(listed[1]):
            counts = " and ".join(str(len(cases)) for cases in listed)
            raise BadInput(
                f"params: the two files give {counts} cases; let them differ in values, not in how many there are"
            )
        pairs = list(zip(*listed, strict=True))
    else:
        by_id = {case["case_id"]: case for case in listed[1]}
        pairs = [(case, by_id[case["case_id"]]) for case in listed[0] if case["case_id"] in by_id]
    tasks = [
        Task(
            experiment,
            a["case_id"],
            _both(a["factors"], b["factors"]),
            tuple(
                request | {"case_id": case["case_id"]}
                for request, case in zip(requests, (a, b), strict=True)
            ),
        )
        for a, b in pairs
    ]
    taken = [{case["case_id"] for case in side} for side in zip(*pairs, strict=True)] or [
        set(),
        set(),
    ]
    findings = ((VANISHED, "B does not hold this case"), (NEW, "A does not hold this case"))
    only = [
        Line(experiment, case_name(case["factors"]), "", finding, message=message)
        for cases, known, (finding, message) in zip(listed, taken, findings, strict=True)
        for case in cases
        if case["case_id"] not in known
    ]
    return tasks, only


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The factors of a pair: those that differ name both."""
    return {
        name: a.get(name) if a.get(name) == b.get(name) else f"{a.get(name)} → {b.get(name)}"
        for name in {**a, **b}
    }


def _lines(one: Compared, metric: str, settings: Settings) -> list[Line]:
    task, (fine_a, fine_b) = one.task, (status == Status.OK for status, _ in one.round.endings)
    if not (fine_a and fine_b):
        finding = BROKE if fine_a else NEW if fine_b else Kind.INCONCLUSIVE
        return [Line(task.experiment, task.case, "", finding, message=one.round.failures)]
    frames = [_frame(task, rows) for rows in one.round.rows]
    exact = (
        list(exact_lines(*frames, settings.threshold))
        if all(len(frame) for frame in frames)
        else []
    )
    lines = [line for line in exact if line.finding == CHANGED or line.metric.split()[0] == metric]
    if metric not in TIMED:
        return lines or [
            Line(
                task.experiment,
                task.case,
                metric,
                Kind.INCONCLUSIVE,
                message="the case has no such figure",
            )
        ]
    for scope, found in one.round.blocks.items():
        verdict = one.verdicts.get(scope)
        if verdict is None:
            message = f"{found} are too few; raise --budget"
        else:
            message = "; ".join(part for part in (verdict.open, _notes(one), str(found)) if part)
        kind = verdict.kind if verdict else Kind.INCONCLUSIVE
        name = f"{metric} {scope}".strip()
        values = _levels(found.a, found.b, verdict, metric)
        lines.append(Line(task.experiment, task.case, name, kind, *values, verdict, message))
    return lines or [
        Line(task.experiment, task.case, "", Kind.INCONCLUSIVE, message="nothing is timed in it")
    ]


def _levels(
    a: list[float], b: list[float], verdict: Verdict | None, metric: str
) -> tuple[float | None, float | None]:
    """The block times of A and B, ms, as far apart as the verdict says; none of a rate, whose work is the version's own affair."""
    if metric != "latency":
        return None, None
    if verdict is None:
        return float(np.median(a)), float(np.median(b))
    return paired_levels(a, b, verdict.ratio)


def _notes(one: Compared) -> str:
    """What a reader should know of sides that ended well."""
    sides = zip("AB", one.round.endings, strict=True)
    return "; ".join(
        f"{side}: {said}" for side, (status, said) in sides if status == Status.OK and said
    )


def _frame(task: Task, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows that a version made by itself, as the store would give them."""
    shared = {
        "experiment": task.experiment,
        "case_id": task.case_id,
        "factors": task.factors,
        "run_id": "",
    }
    return pd.DataFrame([{**row, **shared} for row in rows if row["estimate"] is not None])


def _time_ratio(verdict: Verdict) -> tuple[float, float, float]:
    """Time of B over time of A, and its interval; of a rate the ratio is the other way round."""
    low, ratio, high = verdict.interval.low, verdict.ratio, verdict.interval.high
    return (
        (1 / ratio, 1 / high, 1 / low)
        if verdict.direction is Direction.HIGHER
        else (ratio, low, high)
    )


def stored(answer: Answer, question: Question, label: str = "") -> Run:
    """The answer as a run with its rows: one `ratio` per case and timing, for the database and the report.

    Args:
        answer: What came out.
        question: What was asked.
        label: The user's name for it.
    """
    from nanolib.meters.machine import this_machine, versions

    called = dict(zip("ab", question.named(answer.versions), strict=True))
    rows = {}
    for one in answer.compared:
        measured = []
        for scope, verdict in one.verdicts.items():
            pairs = one.round.blocks[scope]
            statistics = {"kind": verdict.kind, "p": verdict.p, "threshold": verdict.threshold}
            statistics |= {
                "minimum_detectable_effect": verdict.minimum_detectable_effect,
                "rounds": 1,
            }
            statistics["generations"] = pairs.generations
            measured.append(
                Measurement(
                    "ratio",
                    *(*_time_ratio(verdict), 0.95, len(pairs.a)),
                    samples=tuple(
                        later / former for former, later in zip(pairs.a, pairs.b, strict=True)
                    ),
                    method="interleaved pairs",
                    scope=scope,
                    details=statistics
                    | called
                    | {"metric": question.metric, "base_ms": pairs.a, "current_ms": pairs.b},
                )
            )
        status = Status.OK if measured and one.round.fine else Status.ERROR
        ending = Measurement("case_time", status=status, message=one.round.failures)
        rows[one.task.case_id] = (
            {"experiment": one.task.experiment, **one.task.factors},
            [ending, *measured],
        )
    params = {
        "a": called["a"],
        "b": called["b"],
        "differ": question.differ,
        "metric": question.metric,
        "functions": list(question.functions),
    }
    return Run(
        EXPERIMENT,
        this_machine().to_dict(),
        params,
        label=label,
        device=device_of(answer.compared[0].task),
        versions=versions(),
        git_revision=answer.versions[1].revision,
        rows=rows,
    )
