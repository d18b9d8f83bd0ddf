"""What `nano ab` compares, and the tasks that both versions have."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanolib.ab.interpreter import Interpreter, differences, titles
from nanolib.ab.pairs import CALL, Task
from nanolib.ab.processes import VersionDied, VersionProcess
from nanolib.ab.worktree import Version
from nanolib.compare.findings import MISSING, NEW, Line
from nanolib.compare.history import TIMED
from nanolib.compare.runs import COUNTED
from nanolib.measurement import BadInput, case_name


@dataclass(frozen=True)
class Spec:
    """What `nano ab` compares.

    Attributes:
        names: Git revisions of A and B, or `.` for the working tree.
        start: A folder of the repository.
        jobs: Experiments, each with the parameters for A and for B.
        functions: Functions `package.module:function`, called without arguments.
        setup: A function whose result they are called with instead; empty for none.
        metric: What is compared.
        titles: What A and B are called if `names` are the same.
        interpreters: The interpreters of A and B; None if one runs both.
    """

    names: tuple[str, str]
    start: Path
    jobs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = ()
    functions: Sequence[str] = ()
    setup: str = ""
    metric: str = "latency"
    titles: tuple[str, str] = ("", "")
    interpreters: tuple[Interpreter, Interpreter] | None = None

    def __post_init__(self) -> None:
        allowed = (*TIMED, *COUNTED)
        if self.metric not in allowed:
            raise BadInput(
                f"--metric: {self.metric!r} cannot be compared; use one of {', '.join(allowed)}"
            )
        for interpreter in self.interpreters or ():
            if self.jobs and (missing := interpreter.lacks("nanolib")):
                raise BadInput(
                    f"{interpreter.python}: {', '.join(missing)} missing; install what nanolib needs there"
                )
        for name in (*self.functions, *filter(None, [self.setup])):
            module, _, function = name.partition(":")
            if not (module and function):
                raise BadInput(f"--call: {name!r} names no function; write package.module:function")

    def titles_of(self, versions: Sequence[Version]) -> list[str]:
        """A and B as people read them."""
        pairs = zip(self.titles, versions, strict=True)
        return [title or version.title for title, version in pairs]

    @property
    def differences(self) -> list[str]:
        """The packages that differ between the interpreters, each with both versions."""
        if self.interpreters is None:
            return []
        return [f"{name} {a} → {b}" for name, a, b in differences(*self.interpreters)]

    def with_interpreters(self, versions: Sequence[Version]) -> list[Version]:
        """The versions, each with its interpreter."""
        if self.interpreters is None:
            return list(versions)
        each = zip(versions, self.interpreters, titles(*self.interpreters), strict=True)
        return [
            replace(version, python=one.python, environment=title) for version, one, title in each
        ]

    def tasks(self, versions: Sequence[Version], timeout_s: float) -> tuple[list[Task], list[Line]]:
        """List what both versions have, and a finding for each case that only one of them has.

        Args:
            versions: A and B, with their files.
            timeout_s: How long one answer of a version may take.

        Raises:
            BadInput: A version cannot list its cases, or both have none in common.
        """
        tasks, lines = [self._call_task(name) for name in self.functions], []
        if self.jobs:
            with (
                VersionProcess(versions[0], timeout_s) as a,
                VersionProcess(versions[1], timeout_s) as b,
            ):
                for experiment, *params in self.jobs:
                    more, only_one = _common_cases(experiment, params, (a, b))
                    tasks += more
                    lines += only_one
        if not tasks:
            raise BadInput(
                "ab: both versions have no timed case in common; name another notebook or other parameters"
            )
        return tasks, lines

    def _call_task(self, name: str) -> Task:
        request = {"do": "function", "function": name, "setup": self.setup}
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return Task(CALL, digest, {"name": name}, (request, request))


def _common_cases(
    experiment: str, params: Sequence[Mapping[str, Any]], processes: Sequence[VersionProcess]
) -> tuple[list[Task], list[Line]]:
    """Pair the cases of A and B by their id, or by their position if their parameters differ."""
    requests = [{"experiment": experiment, "params": dict(values)} for values in params]
    for process, request in zip(processes, requests, strict=True):
        process.send(do="cases", **request)  # both import at the same time
    a_cases, b_cases = (_received_cases(process) for process in processes)
    if params[0] == params[1]:
        in_b = {case["case_id"]: case for case in b_cases}
        pairs = [(case, in_b[case["case_id"]]) for case in a_cases if case["case_id"] in in_b]
        lines = [
            *_only_in(experiment, a_cases, b_cases, MISSING, "B does not have this case"),
            *_only_in(experiment, b_cases, a_cases, NEW, "A does not have this case"),
        ]
    elif len(a_cases) == len(b_cases):
        pairs, lines = list(zip(a_cases, b_cases, strict=True)), []
    else:
        raise BadInput(
            f"params: the two files give {len(a_cases)} and {len(b_cases)} cases; "
            "give files that differ in values and have the same number of cases"
        )
    return [_case_task(experiment, pair, requests) for pair in pairs], lines


def _received_cases(process: VersionProcess) -> list[dict[str, Any]]:
    try:
        answer = process.receive()
    except VersionDied as death:
        raise BadInput(f"{process.version.called}: {death}") from None
    if "cases" not in answer:
        raise BadInput(f"{process.version.called}: {answer['message']}")
    return answer["cases"]


def _only_in(
    experiment: str,
    cases: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    finding: str,
    message: str,
) -> list[Line]:
    known = {case["case_id"] for case in others}
    return [
        Line(experiment, case_name(case["factors"]), "", finding, message=message)
        for case in cases
        if case["case_id"] not in known
    ]


def _case_task(
    experiment: str, pair: Sequence[Mapping[str, Any]], requests: Sequence[Mapping[str, Any]]
) -> Task:
    a, b = (case["factors"] for case in pair)
    factors = {
        name: a.get(name) if a.get(name) == b.get(name) else f"{a.get(name)} → {b.get(name)}"
        for name in {**a, **b}
    }
    asked = [
        {"do": "case", "case_id": case["case_id"], **request}
        for case, request in zip(pair, requests, strict=True)
    ]
    return Task(experiment, pair[0]["case_id"], factors, (asked[0], asked[1]))
