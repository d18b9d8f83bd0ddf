import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanolib.measurement import BadInput, Measurement
from nanolib.meters.machine import this_machine
from nanolib.run import provenance, sweep
from nanolib.run.dry_run import expected_s
from nanolib.run.group import Canceled
from nanolib.run.provenance import new_run
from nanolib.run.timeout import Outcome
from nanolib.store.identity import host, process_name
from tests.run import sample_experiment as sample

ROOT = Path(__file__).parents[2]


def _measure(store, *behaviors, **rest):
    return sweep.measure(
        sample, sample.Params(behaviors=list(behaviors), **rest), store=store, progress=False
    )


def _ends(run):
    rows = run.measurements()
    ends = rows[rows.metric == "case_duration"]
    return dict(
        zip(ends["factor.behavior"], zip(ends.status, ends.message, strict=True), strict=True)
    )


def test_every_way_to_fail_is_a_row_and_the_sweep_goes_on(store):
    run = _measure(
        store, "oom", "memory", "unsupported", "error", "slow", "nan", "ok", case_timeout_s=0.3
    )
    ends = _ends(run)
    assert {name: status for name, (status, _) in ends.items()} == {
        "oom": "oom",
        "memory": "oom",
        "unsupported": "unsupported",
        "error": "error",
        "slow": "timeout",
        "nan": "error",
        "ok": "ok",
    }
    assert ends["unsupported"][1] == "no such device here"
    assert ends["error"][1] == "ValueError: two lines"
    assert "case_timeout_s 0.3; raise it" in ends["slow"][1]
    assert ends["nan"][1].startswith(
        "the case has rows that cannot be stored: Out of range float values"
    )
    assert all("\n" not in message for _, message in ends.values())


def test_a_time_limit_never_leaves_half_a_module_behind(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.4)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    outcome = Outcome()
    with outcome.within(0.1):
        import slow_module

        time.sleep(5 * slow_module.whole)
    assert outcome.status == "timeout"
    assert sys.modules.pop("slow_module").whole


def test_a_run_is_done_only_when_it_says_so(store):
    run = _measure(store, "ok")
    assert store.runs().status.iloc[0] == "running"
    assert run.finish() == f"run {run.run_id[:8]} is in {store.path.name}"
    assert store.runs().status.iloc[0] == "done" and store.runs().duration_s.iloc[0] > 0


def test_a_fresh_process_per_case_gives_the_same_rows_and_may_end_without_them(store):
    here = _measure(store, "ok", "error")
    there = _measure(store, "ok", "error", "exit", isolation="process")
    ends = _ends(there)
    assert ends.pop("exit") == ("error", "the process ended with 0")
    assert ends == _ends(here)
    columns = ["metric", "scope", "factors", "status"]
    rows = there.measurements()
    assert rows[rows["factor.behavior"] != "exit"][columns].equals(here.measurements()[columns])


def test_a_case_that_was_in_flight_is_measured_in_its_own_process(store, tmp_path, capfd):
    asked = {"folder": str(tmp_path), "resume": True}
    with pytest.raises(KeyboardInterrupt):
        _measure(store, "ok", "interrupt", "ok-2", **asked)
    run = _measure(store, "ok", "interrupt", "ok-2", **asked)
    resumed = f"resuming run {run.run_id[:8]}: 1 of 3 cases are done and skipped"
    assert resumed in capfd.readouterr().err
    assert _ends(run)["interrupt"][0] == "error" and _ends(run)["ok-2"][0] == "ok"
    assert (tmp_path / "ok.calls").read_text() == "x"
    assert run.measurements().groupby(["case_id", "metric", "scope"]).size().max() == 1


def test_resume_goes_on_with_what_is_unfinished_and_begins_anew_when_a_parameter_differs(store):
    first = _measure(store, "ok")
    run = _measure(store, "ok", resume=True, label="again")
    assert run.run_id == first.run_id
    run.finish()
    assert list(store.runs().label) == ["again"]
    _measure(store, "ok", resume=True, seed=1).finish()
    assert len(store.runs()) == 2


def test_no_cases_are_told(store):
    with pytest.raises(BadInput, match="these parameters give no case"):
        _measure(store)
    assert store.runs().empty


_RUN = """
import sys
from nanolib.run import sweep
from nanolib.store import Store
from tests.run import sample_experiment as sample

_, database, folder, behaviors = sys.argv
params = sample.Params(behaviors=behaviors.split(), folder=folder)
sweep.measure(sample, params, store=Store(database), progress=False).finish()
"""


def _start(store, behaviors):
    command = [sys.executable, "-c", _RUN, str(store.path), str(store.path.parent), behaviors]
    return subprocess.Popen(command, cwd=ROOT)


@pytest.mark.slow
def test_two_runs_at_once_are_both_whole(store, tmp_path):
    first = _start(store, "wait ok")
    while not (tmp_path / "waiting").exists():
        assert first.poll() is None
        time.sleep(0.05)
    lines = []

    def release(done, total, line):
        lines.append(line)
        (tmp_path / "go").touch()

    params = sample.Params(behaviors=["ok", "ok-2"])
    sweep.measure(sample, params, store=store, progress=False, on_progress=release).finish()
    assert lines[0].startswith(f"waiting for cpu: in use by process {first.pid}")
    assert first.wait(60) == 0
    assert list(store.runs().status) == ["done", "done"]
    assert list(store.measurements().groupby("run_id").size()) == [6, 6]


def test_a_killed_run_is_marked_at_the_next_start(store):
    assert _start(store, "ok kill").wait(60) == -signal.SIGKILL
    assert store.connection.execute("SELECT status FROM runs").fetchall() == [("running",)]
    assert list(store.runs().status) == ["interrupted"]  # the stored status is still `running`
    _measure(store, "ok-2").finish()
    assert list(store.runs().status) == ["interrupted", "done"]
    assert store.started_attempts(store.runs().run_id.iloc[0])  # the case in progress is known
    assert len(store.finished_cases(store.runs().run_id.iloc[0])) == 1
    again = {"folder": str(store.path.parent), "resume": True}
    run = _measure(store, "ok", "kill", **again)
    assert len(store.runs()) == 2
    assert _ends(run)["kill"] == ("error", "the process was killed by SIGKILL")
    case = sample.cases(sample.Params(behaviors=["kill"]))[0]
    started = Measurement("case_duration", status="started", details={"attempts": 2})
    store.write_case(run.run_id, case.case_id, case.factors, [started])
    run = _measure(store, "ok", "kill", **again)
    assert _ends(run)["kill"][1].startswith("the run was killed 2 times during this case")


def test_what_stops_a_run_is_written_into_it(store, monkeypatch):
    stop = threading.Event()
    stop.set()
    params = sample.Params(behaviors=["ok"])
    with pytest.raises(Canceled):
        sweep.measure(sample, params, store=store, progress=False, stop=stop)
    monkeypatch.setattr(sweep, "store_outcome", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _measure(store, "ok")
    assert list(zip(store.runs().status, store.runs().message, strict=True)) == [
        ("interrupted", "stopped by the user"),
        ("failed", "ZeroDivisionError: division by zero"),
    ]


def test_a_run_says_what_made_it(store, monkeypatch):
    monkeypatch.setenv(provenance.LAUNCH_VARIABLE, "night")
    _measure(store, "ok", "unsupported", label="mine", suite="quick").finish()
    run = store.runs().iloc[0]
    named = ["experiment", "label", "suite", "device", "launch", "cases"]
    assert list(run[named]) == ["sample_experiment", "mine", "quick", "cpu", "night", 2]
    assert run.params["behaviors"] == ["ok", "unsupported"] and run.process == process_name()
    assert set(run.versions) == {"python", "torch", "platform", "nanolib", "sources"}
    assert len(run.fingerprint) == 16 and run.git_revision == provenance.git_revision()


def test_a_run_that_another_process_is_at_is_not_taken_over(store):
    _measure(store, "ok", label="first")
    store.update_run(store.runs().run_id.iloc[0], process=process_name(os.getppid()), launch="l")
    _measure(store, "ok", resume=True).finish()
    assert len(store.runs()) == 2  # the process of the first run is alive
    for run_id, label in zip(store.runs().run_id, ("before", "last"), strict=True):
        store.update_run(run_id, process=f"{host()}:{os.getppid()}:1.00", label=label, launch=label)
    _measure(store, "ok", resume=True)
    _, run = store.runs().to_dict(
        "records"
    )  # its process is gone: the last is taken over, label and launch with it
    assert (run["label"], run["launch"], run["process"]) == ("last", "last", process_name())


def test_edited_sources_are_another_version_and_a_folder_outside_git_has_no_revision(
    monkeypatch, tmp_path
):
    code = tmp_path / "nanolib" / "__init__.py"
    code.parent.mkdir()
    code.write_text("one = 1\n")
    monkeypatch.setattr(provenance.nanolib, "__file__", str(code))
    sources, revision = provenance.source_digest.__wrapped__, provenance.git_revision.__wrapped__
    first = sources()
    assert len(first) == 12 and sources() == first and revision() == ""
    identity = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    for command in (["init"], ["add", "."], [*identity, "commit", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True, capture_output=True)
    committed = revision()
    code.write_text("one = 2\n")
    assert sources() != first and committed and revision() == f"{committed}+"


def test_a_dry_run_expects_what_cases_took_before_with_the_same_timing(store):
    machine_id = this_machine().machine_id
    params = sample.Params(behaviors=["ok", "ok-2", "ok-3"])

    def expected(**changes):
        cases = sample.cases(params)
        return expected_s(params.replace(**changes), cases, store, machine_id)

    assert expected() is None
    for times in ((1.0, 2.0), (3.0, 4.0)):
        run_id = store.add(new_run("sample_experiment", params, "cpu", 3))
        for case, seconds in zip(sample.cases(params), times, strict=False):
            sweep.store_outcome(store, run_id, case, Outcome(seconds=seconds))
    assert expected() == pytest.approx((1 + 2 + 1.75, 2 + 3 + 2.5, 3 + 4 + 3.25))
    assert expected(budget_s=9.0) is None
