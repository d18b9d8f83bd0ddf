"""pytest: what a test calls by the fixture `nano` is called once, and with `--nano` measured and stored.

    def test_step(nano):
        nano(step, x)

Parameters of the test are the factors of its case. `nano ab main . --pytest tests/perf` times tests of two versions in turns.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nanolib.measurement import Measurement
    from nanolib.meters.time.call_check import CallCheck
    from nanolib.run.outcome import Outcome

EXPERIMENT = "pytest"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the command line."""
    group = parser.getgroup("nanolib", "nanolib: measure what tests call by the fixture nano")
    group.addoption(
        "--nano", action="store_true", help="Measure, and store what comes out; without it nothing is timed."
    )
    group.addoption("--nano-label", default="", metavar="NAME", help="Your name for the run.")
    group.addoption("--nano-output", metavar="DIR", help="Output folder; default: $NANOLIB_OUTPUT, or outputs/.")
    group.addoption(
        "--nano-budget", type=float, default=2.0, metavar="SECONDS", help="At most this long for one timing."
    )
    group.addoption(
        "--nano-rel-ci", type=float, default=0.01, metavar="SHARE", help="Stop at this half-width of the interval."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure, where that was asked for."""
    if not config.getoption("nano") or hasattr(config, "workerinput"):
        return
    if config.getoption("numprocesses", None):
        raise pytest.UsageError("--nano: tests are timed one at a time; leave out -n")
    config.pluginmanager.register(_Recorder(config), "nanolib_recorder")


@pytest.fixture
def nano(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call a function with its arguments and return its result.

    With `--nano` how long a call takes is measured as well.
    """
    recorder = request.config.pluginmanager.get_plugin("nanolib_recorder")
    calls = 0

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if recorder is None:
            return function(*args, **kwargs)
        check = recorder.check(lambda: function(*args, **kwargs))
        result = check()
        recorder.record(request.node, check, calls, (args, kwargs, result))
        return result

    return call


class _Recorder:
    """A run of the tests that measure: it begins with the first, and ends with the session."""

    def __init__(self, config: pytest.Config) -> None:
        from nanolib.measurement import BadInput
        from nanolib.paths import OUTPUT_VARIABLE, expanded, make_folder, output_folder
        from nanolib.run.params import Params

        class TestParams(Params):
            NAME = EXPERIMENT

        options = {name: config.getoption(f"nano_{name}") for name in ("label", "rel_ci")}
        if folder := config.getoption("nano_output"):
            os.environ[OUTPUT_VARIABLE] = str(expanded(folder).absolute())
        try:
            self.params = TestParams(budget_s=config.getoption("nano_budget"), **options)
            make_folder(output_folder())
        except BadInput as error:
            asked = "\n".join(error.lines).replace(f"{EXPERIMENT}.budget_s", "--nano-budget")
            raise pytest.UsageError(asked.replace(f"{EXPERIMENT}.rel_ci", "--nano-rel-ci")) from None
        self._root = config.rootpath
        self._open = contextlib.ExitStack()
        self._run: Any = None
        self._cases = 0
        self._outcomes: dict[str, tuple[Any, Outcome]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """How many cases there will be."""
        from nanolib.ab.pytest_session import takes_fixture

        self._cases = sum(map(takes_fixture, session.items))

    def _begin(self) -> Any:
        """The run, with the device locked; made with the first measurement."""
        if self._run is None:
            from nanolib.meters.machine import resolve_device
            from nanolib.run.lock import device_lock
            from nanolib.run.sources import git_revision
            from nanolib.run.sweep import SweepRun, new_run
            from nanolib.store import Store

            device = resolve_device(self.params.device)
            self._open.enter_context(device_lock(device, f"{EXPERIMENT} {self.params.label}".strip()))
            store = self._open.enter_context(Store())
            run = new_run(store, EXPERIMENT, self.params, device, self._cases)
            run = replace(run, git_revision=git_revision(self._root))
            self._run = SweepRun(store, store.add(run))
        return self._run

    @staticmethod
    def check(call: Callable[[], object]) -> CallCheck:
        """The call, whose first two calls are looked at."""
        from nanolib.measurement import BadInput
        from nanolib.meters.time.call_check import CallCheck

        return CallCheck(call, "nano", BadInput)

    def record(self, item: pytest.Item, call: CallCheck, number: int, values: object) -> None:
        """Measure a call, and store it as a case.

        Args:
            item: The test.
            call: What is measured.
            number: Which call of the test's it is, from 1.
            values: Arguments and result: the tensors among them say where the call computes.
        """
        from nanolib.ab.pytest_session import factors_of, scope_of
        from nanolib.meters import measure
        from nanolib.run.outcome import attempt
        from nanolib.run.sweep import store_outcomes

        run, device = self._begin(), _device_of(values)

        def rows() -> Iterator[Measurement]:
            yield measure(call, **self.params.timing(device), scope=scope_of(number))

        outcome = attempt(rows, self.params.case_timeout_s)
        if number > 1:
            case, before = self._outcomes[item.nodeid]
            outcome = replace(outcome, rows=[*before.rows, *outcome.rows], seconds=before.seconds + outcome.seconds)
        else:
            case = _case(factors_of(item) | {"device": device})
        self._outcomes[item.nodeid] = case, outcome
        store_outcomes(run.store, run.run_id, [case], {case.case_id: outcome}, {case.case_id: 1})
        if outcome.status != "ok":
            pytest.fail(f"nano: {outcome.status}: {outcome.message}", pytrace=False)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """End the run."""
        from nanolib.measurement import RunStatus

        with self._open:
            if self._run is not None:
                stopped = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
                self._run.end(RunStatus.INTERRUPTED if stopped else RunStatus.DONE)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line per measurement, and where they are."""
        if self._run is None:
            return
        terminalreporter.section("nanolib")
        for case, outcome in self._outcomes.values():
            for row in outcome.rows or [f"{outcome.status}: {outcome.message}"]:
                terminalreporter.line(f"{case}: {row}")
        terminalreporter.line(f"run {self._run.run_id[:8]} is in {self._run.store.path}; nano compare latest~1 latest")


def _case(factors: dict[str, Any]) -> Any:
    """A test as a case."""
    from nanolib.run.case import Case

    @dataclass(frozen=True)
    class TestCase(Case):
        values: dict[str, Any]

        @property
        def factors(self) -> dict[str, Any]:
            return self.values

        def __str__(self) -> str:
            from nanolib.measurement import case_name

            return case_name(self.values)

    return TestCase(factors["device"], factors)


def _device_of(values: Any) -> str:
    """Where the first tensor among some values lies that is not on the CPU; `cpu` without one."""
    if hasattr(values, "device") and hasattr(values, "requires_grad"):
        return str(values.device)
    if hasattr(values, "parameters") and callable(values.parameters):
        values = list(values.parameters())
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple | set) else ()
    return next((found for found in map(_device_of, inner) if found != "cpu"), "cpu")
