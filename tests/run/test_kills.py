"""After SIGKILL or Ctrl-C, no process that nanolib started survives, and the database is whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanolib.store import Store
from tests.processes import said

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a parent is looked for"),
]

ROOT = Path(__file__).parents[2]
HANGING_S = 180
# The first case of two ranks never ends.
LONG = {
    "isolation": "process",
    "world_sizes": "[2]",
    "seq_lens": "[64]",
    "algorithms": "[gather]",
    "prefill_seq_lens": "[]",
    "memory_seq_lens": "[]",
    "budget_s": "80000",
    "rel_ci": "1e-12",
}
# The peak rates of attention end, and no other case does.
ATTENTION = {
    "attention_types": "[dense]",
    "quality_patterns": "[]",
    "seq_lens": "[16]",
    "budget_s": "60",
    "rel_ci": "1e-9",
}


@pytest.fixture
def place(tmp_path):
    """A folder for temporary files and one for results."""
    for name in ("temporary", "results"):
        (tmp_path / name).mkdir()
    return tmp_path


def _start(place, *arguments):
    command = [sys.executable, "-m", "nanolib.cli", *arguments, "--output", str(place / "results")]
    environment = os.environ | {"TMPDIR": str(place / "temporary"), "PYTHONPATH": str(ROOT)}
    with (place / "said").open("w") as said:
        return psutil.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL
        )


def _below(process):
    return {one: said(one) for one in process.children(recursive=True)}


def _wait(process, wanted):
    """Return what `wanted` finds among the descendants, as soon as it finds something."""
    end = time.monotonic() + HANGING_S
    while time.monotonic() < end and process.is_running():
        if found := wanted(_below(process)):
            return found
        time.sleep(0.1)
    below = _below(process)
    process.kill()  # its children must not appear in later tests
    raise AssertionError(f"it did not come up: {below}")


def _kill(victim):
    """Kill a process, and check that none of its descendants survives."""
    below = victim.children(recursive=True)
    victim.kill()
    _, alive = psutil.wait_procs(below, timeout=HANGING_S)
    assert not alive


def _run(place, notebook, params):
    given = [word for pair in params.items() for word in ("-p", "=".join(pair))]
    return _start(place, "run", notebook, "--no-report", *given)


def test_ctrl_c_saves_what_is_finished_and_leaves_no_process(place):
    nano = _run(place, "attention", ATTENTION)
    database = place / "results" / "results.sqlite"

    def a_case_has_ended(_):
        if database.exists():
            with Store(database) as store:
                return {"started", "ok"} <= {*store.measurements().status}
        return False

    _wait(nano, a_case_has_ended)
    below = nano.children(recursive=True)
    nano.send_signal(signal.SIGINT)
    assert nano.wait(60) == 130 and "stopped by Ctrl-C" in (place / "said").read_text()
    assert not any(map(said, below))
    with Store(database) as store:
        (run,) = store.runs().itertuples()
        assert run.status == "interrupted" and store.finished_cases(run.run_id)


def test_nothing_that_a_run_started_lives_on_when_it_is_killed(place):
    nano = _run(place, "distributed", LONG)

    def all_are_up(below):
        words = " ".join(below.values())  # a worker, the process that starts ranks, and two ranks
        is_complete = words.count("--multiprocessing-fork") >= 4
        return is_complete and "papermill" in words and "ipykernel" in words

    _wait(nano, all_are_up)
    _kill(nano)
    with Store(place / "results" / "results.sqlite") as store:
        assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert list(store.runs().status) == ["interrupted"]
