"""After SIGKILL or Ctrl-C, no process that nanolib started survives, and the database is whole."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from nanolib.paths import checkout
from nanolib.run.process import kill_tree
from nanolib.store import Store
from tests.processes import said
from tests.waiting import until

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a parent is looked for"),
]

# The first case of two ranks never ends.
LONG = """
run distributed --no-report -p isolation=process -p world_sizes=[2] -p seq_lens=[64]
-p algorithms=[gather] -p prefill_seq_lens=[] -p memory_seq_lens=[] -p budget_s=80000
-p rel_ci=1e-12
"""
# The peak rates of attention end, and no other case does.
ATTENTION = """
run attention --no-report -p attention_types=[dense] -p quality_attentions=[] -p seq_lens=[16]
-p budget_s=60 -p rel_ci=1e-9
"""


@pytest.fixture
def run(tmp_path):
    """Start nano with its own folder for temporary files, and end it after a failure too."""
    own = {"TMPDIR": str(tmp_path), "PYTHONPATH": str(checkout())}
    started = []

    def start(arguments):
        command = [sys.executable, "-m", "nanolib.cli", *arguments.split()]
        with (tmp_path / "said").open("w") as log:
            started.append(
                psutil.Popen(
                    [*command, "--output", str(tmp_path)],
                    cwd=checkout(),
                    env=os.environ | own,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        return started[0]

    yield start
    kill_tree(started[0].pid)


def test_a_stop_saves_what_is_finished_and_leaves_no_process(run, tmp_path):
    nano, database = run(ATTENTION), tmp_path / "results.sqlite"

    def a_case_has_ended():
        if not database.exists():
            return False
        with Store(database) as store:
            return {"started", "ok"} <= {*store.measurements().status}

    until(a_case_has_ended)
    below = nano.children(recursive=True)
    nano.send_signal(signal.SIGTERM)  # as of a cluster; it is handled as Ctrl-C is
    assert nano.wait(60) == 130
    text = (tmp_path / "said").read_text()
    assert "stopped by Ctrl-C" in text and "was not measured" not in text
    until(lambda: not any(map(said, below)))
    with Store(database) as store:
        (run,) = store.runs().itertuples()
        assert run.status == "interrupted" and store.finished_cases(run.run_id)
        assert not store.started_attempts(run.run_id)  # unlike a kill, it counts for nothing


def test_nothing_that_a_run_started_lives_on_when_it_is_killed(run, tmp_path):
    nano = run(LONG)

    def all_are_up():
        words = " ".join(map(said, nano.children(recursive=True)))
        # papermill, a worker, the process that starts ranks, and two ranks
        return words.count("--multiprocessing-fork") >= 5 and "ipykernel" in words

    until(all_are_up)
    below = nano.children(recursive=True)
    nano.kill()
    until(lambda: not any(map(said, below)))
    with Store(tmp_path / "results.sqlite") as store:
        assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert list(store.runs().status) == ["interrupted"]
