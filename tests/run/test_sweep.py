"""A sweep stores each failure as a row, waits for other runs, and continues interrupted ones."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nanolib.measurement import BadInput, Measurement
from nanolib.meters.machine import this_machine
from nanolib.paths import checkout
from nanolib.run import outcome, prepare, sweep
from nanolib.run.group import Canceled
from nanolib.run.outcome import Outcome
from nanolib.run.prepare import expected_s, new_run
from nanolib.store.connection import host, process_name
from tests.ab.conftest import Repository
from tests.run import sample_experiment as sample
from tests.run.sample_experiment import ends
from tests.waiting import until


def test_every_way_to_fail_is_a_row_and_the_sweep_goes_on(measure):
    expected = {
        "oom": "oom",
        "memory": "oom",
        "unsupported": "unsupported",
        "error": "error",
        "slow": "timeout",
        "nan": "error",
        "huge": "oom_predicted",
        "ok": "ok",
    }
    run = measure(*expected, case_timeout_s=0.3)
    found = ends(run)
    assert found.status.to_dict() == expected
    assert found.message["huge"].startswith("the case needs 1,099,511,627,776 MiB, over 90% of the")
    assert found.message["nan"].startswith("the case has rows that cannot be stored: Out of range")
    assert "huge" not in set(run.measurements().query("metric == 'flops'")["factor.behavior"])
    counts = ": 2 error, 1 ok, 2 oom, 1 oom_predicted, 1 timeout, 1 unsupported; "
    assert counts in repr(run) and repr(run).endswith(" s inside cases")


def test_a_limit_is_over_when_its_case_ends_and_an_outer_limit_goes_on(monkeypatch):
    expired, handle = [], signal.signal

    def slowly(*given):
        before = handle(*given)
        time.sleep(0.3)  # longer than the limit of the case
        return before

    before = handle(signal.SIGALRM, lambda *_: expired.append(1))
    monkeypatch.setattr(outcome.signal, "signal", slowly)
    with Outcome().within(0.1):
        pass
    handle(signal.SIGALRM, before)
    monkeypatch.undo()
    assert not expired
    slow = Outcome()
    with slow.within(0.1):
        with outcome.planning_time_limit():
            pass
        time.sleep(60)
    assert slow.status == "timeout"


def test_resume_continues_the_last_run_alike_that_no_other_process_is_at(measure, store):
    measure("ok", label="first")
    store.update_run(store.runs().run_id.iloc[0], process=process_name(os.getppid()))
    measure("ok", label="first", resume=True)
    assert len(store.runs()) == 2  # the process of the first run is alive
    for run_id, launch in zip(store.runs().run_id, ("before", "last"), strict=True):
        gone = f"{host()}:{os.getppid()}:1.00"
        store.update_run(run_id, process=gone, message="killed", launch=launch)
    measure("ok", label="first", resume=True)
    _, run = store.runs().to_dict("records")  # its process is gone, so the last is continued
    assert [run[name] for name in ("launch", "process", "message")] == ["last", process_name(), ""]
    for other in ({"seed": 1, "label": "first"}, {"label": "second"}, {}):
        before = len(store.runs())
        measure("ok", resume=True, **other).finish()
        measure("ok", resume=True, **other)
        assert len(store.runs()) == before + 1


_RUN = """
import sys
from nanolib.run import sweep
from nanolib.store import Store
from tests.run import sample_experiment as sample

_, database, folder, behaviors = sys.argv
params = sample.Params(behaviors=behaviors.split(), folder=folder)
sweep.measure(sample, params, store=Store(database)).finish()
"""


def _start(store, behaviors):
    command = [sys.executable, "-c", _RUN, str(store.path), str(store.path.parent), behaviors]
    return subprocess.Popen(command, cwd=checkout())


@pytest.mark.slow
def test_two_runs_at_once_are_both_whole(measure, store, tmp_path):
    first = _start(store, "wait ok")
    until((tmp_path / "waiting").exists)
    lines = []

    def release(line):
        lines.append(line)
        (tmp_path / "go").touch()

    sweep.measure(
        sample, sample.Params(behaviors=["ok", "ok 2"]), store=store, on_progress=release
    ).finish()
    assert lines[0].startswith(f"waiting for cpu: in use by process {first.pid}")
    assert first.wait(60) == 0
    assert list(store.runs().status) == ["done", "done"]
    assert list(store.measurements().groupby("run_id").size()) == [6, 6]


def test_a_killed_run_is_interrupted_and_its_case_is_tried_twice(measure, store, tmp_path, capfd):
    assert _start(store, "ok kill").wait(300) == -signal.SIGKILL
    assert list(store.runs().status) == ["interrupted"]
    again = {"folder": str(tmp_path), "resume": True}
    run = measure("ok", "kill", **again)
    resumed = f"resuming run {run.run_id[:8]}: 1 of 2 cases are done and skipped"
    assert resumed in capfd.readouterr().err and len(store.runs()) == 1
    assert (tmp_path / "ok.calls").read_text() == "x"
    assert list(ends(run).loc["kill"]) == ["error", "the process was killed by SIGKILL"]
    case = sample.SampleCase("cpu", "kill")
    started = Measurement("case_duration", status="started", details={"attempts": 2})
    store.write_case(run.run_id, case.case_id, case.factors, [started])
    message = ends(measure("ok", "kill", **again)).message["kill"]
    assert message.startswith("the run was killed 2 times during the case")


def test_what_stops_a_run_is_written_into_it(measure, store, monkeypatch):
    with pytest.raises(BadInput, match="these parameters give no case"):
        measure()
    stop = threading.Event()
    stop.set()
    with pytest.raises(Canceled):
        sweep.measure(sample, sample.Params(), store=store, stop=stop)
    monkeypatch.setattr(sweep, "store_outcome", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure("ok")
    assert store.runs()[["status", "message"]].to_numpy().tolist() == [
        ["interrupted", "stopped by the user"],
        ["failed", "ZeroDivisionError: division by zero"],
    ]


def test_an_edited_checkout_has_its_revision_with_a_plus_and_a_folder_outside_git_none(
    monkeypatch, tmp_path
):
    code = tmp_path / "nanolib" / "__init__.py"
    code.parent.mkdir()
    code.write_text("one = 1\n")
    monkeypatch.setattr(prepare.nanolib, "__file__", str(code))
    assert prepare.git_revision() == ""
    Repository(tmp_path).commit("x")
    committed = prepare.git_revision()
    code.write_text("one = 2\n")
    assert committed and prepare.git_revision() == f"{committed}+"


def test_a_dry_run_expects_what_cases_took_before_with_the_same_timing(store):
    params = sample.Params(behaviors=["ok", "ok 2", "ok 3"])
    cases = sample.cases(params)

    def expected(**changes):
        return expected_s(params.replace(**changes), cases, store, this_machine().machine_id)

    assert expected() is None
    for times in ((1.0, 2.0), (3.0, 4.0)):
        run_id = store.add(new_run(params, "cpu", 3))
        for case, seconds in zip(cases, times, strict=False):
            sweep.store_outcome(store, run_id, case, Outcome(seconds=seconds))
    assert store.case_endings(run_id) == [("ok", 2, 7.0)]
    run_id = store.add(new_run(params, "cpu", 3))
    sweep.store_outcome(store, run_id, cases[0], Outcome())  # copied, so it took no time
    assert expected() == pytest.approx((1 + 2 + 1, 2 + 3 + 2.5, 3 + 4 + 4))
    assert expected(budget_s=9.0) is None
