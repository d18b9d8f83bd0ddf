"""Describe what `nano ab` compares, and list the tasks that both versions have."""

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanolib.ab.children import VersionDied, VersionProcess
from nanolib.ab.pairs import CALL, Request, Task
from nanolib.ab.versions import Interpreter, Version, titles
from nanolib.compare.findings import MISSING, NEW, Line, case_name, describe_differences
from nanolib.compare.runs import COUNTED
from nanolib.measurement import BadInput

Cases = dict[str, Mapping[str, Any]]  # id → factors


@dataclass(frozen=True)
class Spec:
    """The subject of a comparison: versions, cases or functions, and a metric.

    Attributes:
        names: Git revisions of A and B, or `.` for the working tree.
        start: A folder of the repository.
        jobs: Name of each experiment, with the parameters for A and for B.
        functions: Functions to time, each as `package.module:function`.
        setup: Function that creates the argument of each timed function. An empty text means that
            timed functions take no argument.
        metric: Name of the metric to compare.
        titles: Titles of A and B in messages. An empty title means the version's own title.
        interpreters: Interpreters of A and B, or None to run both versions with this interpreter.
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
        if self.metric not in ("latency", *COUNTED):
            allowed = ", ".join(("latency", *COUNTED))
            raise BadInput(f"--metric: {self.metric!r} cannot be compared; use one of {allowed}")
        for name in (*self.functions, *filter(None, [self.setup])):
            module, _, function = name.partition(":")
            if not (module and function):
                option = "--setup" if name == self.setup else "--call"
                raise BadInput(
                    f"{option}: {name!r} is not a function; write package.module:function"
                )

    def titles_of(self, versions: Sequence[Version]) -> list[str]:
        """Return the titles of A and B for messages."""
        pairs = zip(self.titles, versions, strict=True)
        return [title or version.title for title, version in pairs]

    @property
    def differences(self) -> list[str]:
        """Return the packages that differ between the interpreters, each with both versions."""
        if self.interpreters is None:
            return []
        return describe_differences(*(one.packages for one in self.interpreters))

    def with_interpreters(self, versions: Sequence[Version]) -> list[Version]:
        """Return copies of the versions with the interpreters of this spec."""
        if self.interpreters is None:
            return list(versions)
        each = zip(versions, self.interpreters, titles(*self.interpreters), strict=True)
        return [
            replace(version, python=one.python, environment=title) for version, one, title in each
        ]

    def tasks(self, versions: Sequence[Version], timeout_s: float) -> tuple[list[Task], list[Line]]:
        """Return the tasks that both versions have, and a finding for every other case.

        Args:
            versions: The two versions, A and B, with their files.
            timeout_s: Time limit for one answer of a version, s.

        Raises:
            BadInput: A version cannot list its cases, or the versions have no timed case in common.
        """
        tasks, lines = [self._call_task(name) for name in self.functions], []
        with contextlib.ExitStack() as stack:
            if self.jobs:
                processes = [
                    stack.enter_context(VersionProcess(version, timeout_s)) for version in versions
                ]
            for experiment, *params in self.jobs:
                requests = [{"experiment": experiment, "params": dict(values)} for values in params]
                of_a, of_b = _listed_cases(processes, requests)
                if params[0] == params[1]:
                    lines += _only_in(experiment, of_a, of_b, MISSING, "B")
                    lines += _only_in(experiment, of_b, of_a, NEW, "A")
                    of_a = {case: of_a[case] for case in of_a if case in of_b}
                    of_b = {case: of_b[case] for case in of_a}
                elif len(of_a) != len(of_b):
                    raise BadInput(
                        f"params: the two files give {len(of_a)} and {len(of_b)} cases; "
                        "give files that differ in values and have the same number of cases"
                    )
                pairs = zip(of_a.items(), of_b.items(), strict=True)
                tasks += [_case_task(experiment, pair, requests) for pair in pairs]
        if not tasks:
            raise BadInput(
                "ab: the two versions have no timed case in common; "
                "name another notebook or other parameters"
            )
        return tasks, lines

    def _call_task(self, name: str) -> Task:
        request = {"do": "function", "function": name, "setup": self.setup}
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return Task(CALL, digest, {"name": name}, (request, request))


def _listed_cases(processes: Sequence[VersionProcess], requests: Sequence[Request]) -> list[Cases]:
    """Return the cases that A and B can time.

    Both processes receive their requests first, so they import at the same time.
    """
    for process, request in zip(processes, requests, strict=True):
        process.send(do="cases", **request)
    listed = []
    for process in processes:
        try:
            answer = process.receive()
        except VersionDied as death:
            raise BadInput(f"{process.version.title}: {death}") from None
        if "cases" not in answer:
            raise BadInput(f"{process.version.title}: {answer['message']}")
        listed.append({case["case_id"]: case["factors"] for case in answer["cases"]})
    return listed


def _only_in(
    experiment: str, cases: Cases, others: Cases, finding: str, without: str
) -> Iterator[Line]:
    message = f"{without} does not have this case"
    for case_id, factors in cases.items():
        if case_id not in others:
            yield Line(experiment, case_name(factors), "", finding, message=message)


def _case_task(
    experiment: str,
    pair: Sequence[tuple[str, Mapping[str, Any]]],
    requests: Sequence[Request],
) -> Task:
    """Return the task of a case. A factor that differs between A and B shows both values."""
    (a_id, a), (b_id, b) = pair
    factors = {
        name: a.get(name) if a.get(name) == b.get(name) else f"{a.get(name)} → {b.get(name)}"
        for name in {**a, **b}
    }
    asked = [
        {"do": "case", "case_id": case_id, **request}
        for case_id, request in zip((a_id, b_id), requests, strict=True)
    ]
    return Task(experiment, a_id, factors, (asked[0], asked[1]))
