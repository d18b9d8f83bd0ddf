"""What `nano ab` compares, and the tasks that both versions have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanolib.ab.children import VersionDied, VersionProcess
from nanolib.ab.pairs import CALL, Task
from nanolib.ab.versions import Interpreter, Version, differences, titles
from nanolib.compare.findings import MISSING, NEW, Line
from nanolib.compare.history import TIMED
from nanolib.compare.runs import COUNTED
from nanolib.measurement import BadInput, case_name

Cases = dict[str, Mapping[str, Any]]  # id → factors


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
        if self.metric not in (*TIMED, *COUNTED):
            allowed = ", ".join((*TIMED, *COUNTED))
            raise BadInput(f"--metric: {self.metric!r} cannot be compared; use one of {allowed}")
        for name in (*self.functions, *filter(None, [self.setup])):
            module, _, function = name.partition(":")
            if not (module and function):
                raise BadInput(f"--call: {name!r} is not a function; write package.module:function")

    def titles_of(self, versions: Sequence[Version]) -> list[str]:
        """Return A and B as people read them."""
        pairs = zip(self.titles, versions, strict=True)
        return [title or version.title for title, version in pairs]

    @property
    def differences(self) -> list[str]:
        """The packages that differ between the interpreters, each with both versions."""
        if self.interpreters is None:
            return []
        return [f"{name} {a} → {b}" for name, a, b in differences(*self.interpreters)]

    def with_interpreters(self, versions: Sequence[Version]) -> list[Version]:
        """Return the versions, each with its interpreter."""
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
            timeout_s: Time limit for one response of a version, s.

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
                    requests = [
                        {"experiment": experiment, "params": dict(values)} for values in params
                    ]
                    of_a, of_b = _listed_cases((a, b), requests)
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
                "ab: both versions have no timed case in common; name another notebook or other parameters"
            )
        return tasks, lines

    def _call_task(self, name: str) -> Task:
        request = {"do": "function", "function": name, "setup": self.setup}
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return Task(CALL, digest, {"name": name}, (request, request))


def _listed_cases(
    processes: Sequence[VersionProcess], requests: Sequence[Mapping[str, Any]]
) -> list[Cases]:
    """Ask A and B for the cases that they can time; both import at the same time."""
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
    requests: Sequence[Mapping[str, Any]],
) -> Task:
    """Return the task of a case; a factor in which A and B differ shows both values."""
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
