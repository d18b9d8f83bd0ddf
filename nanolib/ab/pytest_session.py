"""Tests that time what they call by the fixture `nano`, served one at a time in the process of a version.

Like `server.py`, which loads it, it imports nothing of nanolib's.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

FIXTURE = "nano"
_TAKEN = ("name", "device")  # factors that say something else


def factors_of(item: pytest.Item) -> dict[str, Any]:
    """What a test is: its node id, and those of its parameters that are plain values; the others show in the id."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    plain = {f"{name}_" if name in _TAKEN else name: value for name, value in params.items() if _is_plain(value)}
    return {"name": item.nodeid} | plain


def scope_of(call: int) -> str:
    """What the timing of a test's n-th call is named, from 1."""
    return "" if call == 1 else f"call {call}"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def case_id_of(item: pytest.Item) -> str:
    """Sixteen hexadecimal digits that depend on the test's node id alone."""
    return hashlib.sha256(item.nodeid.encode()).hexdigest()[:16]


def takes_fixture(item: pytest.Item) -> bool:
    """Whether a test times something."""
    return FIXTURE in getattr(item, "fixturenames", ())


class Session:
    """A pytest plugin that runs no test but those it is asked for.

    Args:
        answer: Answers a request.
        check: Makes a `CallCheck` of a call.
        time_calls: Serves timings of a call until it is told to go on, and returns what a reader should know of them; its
            arguments are the check of the call and what its timing is named.
        serve_rest: Serves all requests that follow the first; pytest ends when it returns.
    """

    def __init__(
        self,
        answer: Callable[..., None],
        check: Callable[[Callable[[], object]], Any],
        time_calls: Callable[[Any, str], str],
        serve_rest: Callable[[], object],
    ) -> None:
        self._answer, self._check, self._time_calls, self._serve_rest = answer, check, time_calls, serve_rest
        self._request: dict[str, Any] = {}
        self._items: dict[str, pytest.Item] = {}
        self._calls, self._endings, self._notes, self._said = 0, [], [], ""

    def serve(self, request: dict[str, Any]) -> str:
        """List the tests or run one, as it is asked; the first request collects them.

        Returns:
            Why there are none; empty when it was served.
        """
        if self._items:
            return self._serve(request)
        self._request, arguments = request, request["arguments"]
        quiet = ["-p", "no:cacheprovider", "-p", "no:nanolib", "--capture=no", "--quiet", "--no-header", "--no-summary"]
        code = pytest.main([*arguments, *quiet, *_alone()], plugins=[self])
        if self._items:
            return ""
        why = self._said or ("pytest does not take these arguments" if code == pytest.ExitCode.USAGE_ERROR else "")
        return (
            f"--pytest: {' '.join(arguments)!r} collects no test that takes the fixture {FIXTURE}{why and f' ({why})'}"
        )

    def _serve(self, request: dict[str, Any]) -> str:
        if request["lists"]:
            cases = [{"case_id": case_id, "factors": factors_of(item)} for case_id, item in self._items.items()]
            self._answer(cases=cases, modules=_modules(self._items.values()))
        elif request["case_id"] in self._items:
            ended, message = self._run(self._items[request["case_id"]])
            self._answer(ended=ended, message=message, rows=[])
        else:
            return "the test is no longer collected"
        return ""

    def _run(self, item: pytest.Item) -> tuple[str, str]:
        """Run one test, its fixtures set up and torn down. Returns its status and why."""
        self._calls, self._endings, self._notes = 0, [], []
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        return next((ending for ending in self._endings if ending[0] != "ok"), ("ok", "; ".join(self._notes)))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep what takes the fixture."""
        items[:] = [item for item in items if takes_fixture(item)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember why something could not be collected."""
        if report.failed:
            self._said = _last_line(report.longreprtext)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve, in the place of running all tests."""
        if not session.testsfailed and session.items:
            self._items = {case_id_of(item): item for item in session.items}
            if why := self._serve(self._request):
                self._answer(refused=why)
            self._serve_rest()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember how set-up, call and tear-down ended."""
        status = {"passed": "ok", "skipped": "unsupported"}.get(report.outcome, "error")
        told = report.longrepr[2] if isinstance(report.longrepr, tuple) else _last_line(report.longreprtext)
        self._endings.append((status, "" if status == "ok" else told))

    @pytest.fixture
    def nano(self) -> Callable[..., Any]:
        """Calls a function with its arguments, and times it."""

        def timed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            check = self._check(lambda: function(*args, **kwargs))
            result = check()
            self._calls += 1
            if note := self._time_calls(check, scope_of(self._calls)):
                self._notes.append(note)
            return result

        return timed


def _alone() -> list[str]:
    """Options by which plugins that are here spread nothing over processes, and trace nothing."""
    from importlib.util import find_spec

    return [*(["-n0"] if find_spec("xdist") else []), *(["--no-cov"] if find_spec("pytest_cov") else [])]


def _modules(items: Iterable[pytest.Item]) -> list[str]:
    """The modules of the tests, as their files lie below the working folder."""
    files = dict.fromkeys(Path(os.path.relpath(item.path)) for item in items)
    return [".".join(file.with_suffix("").parts) for file in files if ".." not in file.parts]


def _last_line(text: str) -> str:
    """The first line of the last error, which may go on over several; or the last line of all."""
    lines = ["", *text.splitlines()]
    begins = [i for i, line in enumerate(lines) if line.startswith("E ") and not lines[i - 1].startswith("E ")]
    said = lines[begins[-1]].removeprefix("E") if begins else text.strip().rpartition("\n")[2]
    return said.strip()[:300]
