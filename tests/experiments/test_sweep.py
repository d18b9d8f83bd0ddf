import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanolib.experiments import lock, sweep
from nanolib.experiments.outcome import attempt
from nanolib.measurement import BadInput
from nanolib.store import Store
from tests.experiments import sample_experiment as sample

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "results.sqlite") as opened:
        yield opened


def _measure(store, *behaviours, **rest):
    return sweep.measure(sample, sample.Params(behaviours=list(behaviours), **rest), store=store, progress=False)


def _ends(run):
    rows = run.measurements()
    ends = rows[rows.metric == "case_time"]
    return dict(zip(ends["factor.behaviour"], zip(ends.status, ends.message, strict=True), strict=True))


def test_every_way_to_fail_is_a_row_and_the_sweep_goes_on(store):
    run = _measure(store, "oom", "memory", "unsupported", "error", "slow", "nan", "ok", case_timeout_s=0.3)
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
    assert all("\n" not in message for _, message in ends.values())


def test_a_time_limit_never_leaves_half_a_module_behind(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.4)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def case():
        import slow_module

        yield from range(slow_module.whole)
        time.sleep(5)

    assert attempt(case, timeout_s=0.1).status == "timeout"
    assert sys.modules.pop("slow_module").whole


def test_who_watches_is_told_how_far_it_is(store):
    seen = []
    params = sample.Params(behaviours=["ok", "error", "unsupported"])
    sweep.measure(sample, params, store=store, progress=False, told=lambda *what: seen.append(what))
    assert seen == [(0, 3, "ok"), (1, 3, "error"), (2, 3, "unsupported")]


def test_what_a_failing_case_had_measured_is_kept(store):
    rows = _measure(store, "error").measurements()
    assert list(rows.metric) == ["case_time", "flops"]


def test_a_run_is_done_only_when_it_says_so(store):
    run = _measure(store, "ok")
    assert store.runs().status.iloc[0] == "running"
    assert run.finish() == f"run {run.run_id[:8]} is in {store.path.name}"
    assert store.runs().status.iloc[0] == "done" and store.runs().duration_s.iloc[0] > 0


def test_a_fresh_process_per_case_gives_the_same_rows(store):
    here, there = _measure(store, "ok", "error"), _measure(store, "ok", "error", isolation="process")
    assert _ends(here) == _ends(there)
    columns = ["metric", "scope", "factors", "status"]
    assert here.measurements()[columns].equals(there.measurements()[columns])


@pytest.mark.slow
def test_a_case_that_kills_its_process_twice_is_an_error_and_not_tried_again(store, tmp_path):
    run = _measure(store, "kill", "killonce", "ok", isolation="process", folder=str(tmp_path))
    assert _ends(run)["kill"] == ("error", "its process died 2 times while it ran; it is not tried again")
    assert _ends(run)["killonce"][0] == _ends(run)["ok"][0] == "ok"
    assert (tmp_path / "kill.calls").read_text() == (tmp_path / "killonce.calls").read_text() == "xx"


def test_a_worker_that_hangs_is_ended(store):
    run = _measure(store, "slow", isolation="process", case_timeout_s=0.3)
    assert _ends(run)["slow"][0] == "timeout"


def test_resume_finishes_the_rest_and_repeats_nothing(store, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        _measure(store, "ok", "interrupt", "ok-2", folder=str(tmp_path))
    assert store.runs().status.iloc[0] == "interrupted"
    case = next(case for case in sample.cases(sample.Params(behaviours=["interrupt"])))
    store.write_case(store.runs().run_id.iloc[0], case.case_id, case.factors, [])  # as if it had never started
    with pytest.raises(KeyboardInterrupt):
        _measure(store, "ok", "interrupt", "ok-2", folder=str(tmp_path), resume=True)
    assert len(store.runs()) == 1
    assert (tmp_path / "ok.calls").read_text() == "x" and not (tmp_path / "ok-2.calls").exists()


def test_a_case_in_flight_at_two_deaths_is_not_tried_a_third_time(store, tmp_path, capfd):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            _measure(store, "ok", "interrupt", "ok-2", folder=str(tmp_path), resume=True)
    run = _measure(store, "ok", "interrupt", "ok-2", folder=str(tmp_path), resume=True)
    assert "1 of 3 cases are done and skipped" in capfd.readouterr().err
    assert _ends(run)["interrupt"][0] == "error" and _ends(run)["ok-2"][0] == "ok"
    assert (tmp_path / "ok.calls").read_text() == "x"
    assert run.measurements().groupby(["case_id", "metric", "scope"]).size().max() == 1


def test_resume_begins_anew_when_a_parameter_differs(store):
    _measure(store, "ok").finish()
    _measure(store, "ok", resume=True, label="again").finish()
    assert len(store.runs()) == 1 and store.runs().label.iloc[0] == "again"
    _measure(store, "ok", resume=True, seed=1).finish()
    assert len(store.runs()) == 2


def test_no_cases_are_told(store):
    with pytest.raises(BadInput, match="these parameters give no case"):
        _measure(store)
    assert store.runs().empty


def _hold(device, ready, release):
    with lock.device_lock(device, "the other"):
        ready.set()
        release.wait(30)


def test_a_second_run_waits_and_says_for_whom():
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=("test-wait", ready, release))
    other.start()
    assert ready.wait(60)
    assert lock.holder("test-wait") == f"process {other.pid} (the other)"
    said = []

    def say(line):
        said.append(line)
        release.set()

    with lock.device_lock("test-wait", "me", say):
        assert lock.holder("test-wait") == f"process {os.getpid()} (me)"
    other.join(30)
    assert said == [
        f"waiting for test-wait: in use by process {other.pid} (the other); this run starts when that ends",
        "test-wait is free; starting",
    ]
    assert lock.holder("test-wait") == ""


def test_a_crash_releases_the_device():
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=("test-crash", ready, release))
    other.start()
    assert ready.wait(60)
    os.kill(other.pid, signal.SIGKILL)
    other.join(30)
    said = []
    with lock.device_lock("test-crash", "me", said.append):
        pass
    assert len(said) in (0, 2)  # it may have waited for the kernel to bury the other


@pytest.mark.slow
def test_two_runs_at_once_are_both_whole(store, tmp_path):
    code = (
        "import sys; from nanolib.experiments import sweep; from nanolib.store import Store;"
        "from tests.experiments import sample_experiment as s;"
        "p = s.Params(behaviours=sys.argv[3].split(), folder=sys.argv[2]);"
        "sweep.measure(s, p, store=Store(sys.argv[1]), progress=False).finish()"
    )

    def start(behaviours):
        command = [sys.executable, "-c", code, str(store.path), str(tmp_path), behaviours]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    first = start("wait ok")
    while not (tmp_path / "waiting").exists():
        assert first.poll() is None
        time.sleep(0.05)
    second = start("ok ok-2")
    line = second.stderr.readline()
    assert line.startswith(f"waiting for cpu: in use by process {first.pid}")
    (tmp_path / "go").touch()
    assert first.wait(60) == second.wait(60) == 0
    assert list(store.runs().status) == ["done", "done"]
    assert list(store.measurements().groupby("run_id").size()) == [6, 6]


def test_a_killed_run_is_marked_at_the_next_start(store, tmp_path):
    code = (
        "import sys; from nanolib.experiments import sweep; from nanolib.store import Store;"
        "from tests.experiments import sample_experiment as s;"
        "sweep.measure(s, s.Params(behaviours=['ok', 'kill']), store=Store(sys.argv[1]), progress=False)"
    )
    died = subprocess.run([sys.executable, "-c", code, str(store.path)], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    assert list(store.runs().status) == ["running"]
    _measure(store, "ok-2").finish()
    assert list(store.runs().status) == ["interrupted", "done"]
    assert store.started_attempts(store.runs().run_id.iloc[0])  # the case in flight is known
    assert len(store.finished_cases(store.runs().run_id.iloc[0])) == 1
