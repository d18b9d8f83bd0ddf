"""SIGKILL of each process of a run in turn: what it started ends, the database is whole, the next command tidies up."""

import os
import sqlite3
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
HANGING_S = 60
# What tells each kind of process, in the order in which one starts the next.
KINDS = {
    "papermill": "nanolib.run.suite.warm_kernel",
    "kernel": "ipykernel_launcher",
    "worker": "nanolib.run.worker",
    "launcher": "nanolib.run.ranks.launcher",
    "rank": "nano rank",
}
# Cases of two ranks, which would take for ever.
LONG = {
    "isolation": "process",
    "world_sizes": "[2]",
    "seq_lens": "[64, 128, 256]",
    "algorithms": "[gather]",
    "prefill_seq_lens": "[]",
    "memory_seq_lens": "[]",
    "budget_s": "80000",
    "rel_ci": "1e-12",
}


@pytest.fixture
def place(tmp_path):
    """A folder for temporary files and one for results; whatever is still alive at the end is killed."""
    for name in ("temporary", "results"):
        (tmp_path / name).mkdir()
    return tmp_path


def _start(place, *arguments, cwd=ROOT):
    command = [sys.executable, "-m", "nanolib.cli", *arguments, "--output", str(place / "results")]
    environment = os.environ | {"TMPDIR": str(place / "temporary"), "PYTHONPATH": str(ROOT)}
    with (place / "said").open("w") as said:
        return psutil.Popen(command, cwd=cwd, env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL)


def _below(process):
    return {one: said(one) for one in process.children(recursive=True)}


def _wait(process, wanted):
    """What `wanted` finds among the processes below, as soon as it finds something."""
    end = time.monotonic() + HANGING_S
    while time.monotonic() < end and process.is_running():
        if found := wanted(_below(process)):
            return found
        time.sleep(0.1)
    raise AssertionError(f"it did not come up: {_below(process)}")


def _ranks(below):
    ranks = [one for one, said in below.items() if KINDS["rank"] in said]
    return ranks if len(ranks) == 2 else None


def _kill(victim):
    """The process, and see that nothing below it lives on."""
    below = victim.children(recursive=True)
    victim.kill()
    _, alive = psutil.wait_procs(below, timeout=HANGING_S)
    assert not alive


def _tidy(place):
    """The next command leaves nothing behind, and the database is whole."""
    assert _start(place, "runs").wait(HANGING_S) == 0
    assert {one.name for one in (place / "temporary").iterdir()} <= {"nanolib-cpu.lock"}
    assert not [one.name for one in (place / "results").iterdir() if one.name.startswith(".")]
    with sqlite3.connect(place / "results" / "results.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_what_a_run_started_ends_with_whoever_started_it(place):
    nano = _start(place, "run", "distributed", "--no-report", *(a for p in LONG.items() for a in ("-p", "=".join(p))))
    seen = set()

    def new_ranks(below):
        return below if (ranks := _ranks(below)) and not seen & set(ranks) else None

    for kind in ("rank", "launcher", "worker", "kernel"):
        below = _wait(nano, new_ranks)
        seen |= set(_ranks(below))
        _kill(next(one for one, said in below.items() if KINDS[kind] in said))
    assert nano.wait(HANGING_S) == 1
    with Store(place / "results" / "results.sqlite") as store:
        rows = store.measurements().query("metric == 'case_time'").set_index("factor.seq_len")
        messages, statuses = dict(rows.message), dict(rows.status)
    assert (
        "was killed by SIGKILL" in messages[64] and "the launcher of the ranks was killed by SIGKILL" in messages[128]
    )
    assert statuses == {64: "error", 128: "error", 256: "started"}
    _tidy(place)


@pytest.mark.parametrize("victim", ["nano", pytest.param("papermill", marks=pytest.mark.thorough)])
def test_a_run_ends_with_the_command_that_started_it(place, victim):
    nano = _start(place, "run", "distributed", "--no-report", *(a for p in LONG.items() for a in ("-p", "=".join(p))))
    below = _wait(nano, lambda below: below if _ranks(below) else None)
    _kill(nano if victim == "nano" else next(one for one, said in below.items() if KINDS["papermill"] in said))
    nano.wait(HANGING_S)
    _tidy(place)
    with Store(place / "results" / "results.sqlite") as store:
        assert store.runs().status.iloc[0] in ("interrupted", "failed")


_ENDLESS = """
import pathlib, time

def run():
    pathlib.Path({mark!r}).touch()
    while True:
        time.sleep(0.001)
"""


@pytest.mark.parametrize("victim", ["nano", "fork server", "side"])
def test_both_sides_of_a_comparison_end_with_it(place, victim):
    repository, mark = place / "repository", place / "mark"
    repository.mkdir()
    (repository / "work.py").write_text(_ENDLESS.format(mark=str(mark)))
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "--quiet"], ["add", "-A"], [*name, "commit", "--quiet", "-m", "base"]):
        subprocess.run(["git", "-C", str(repository), *arguments], check=True)
    nano = _start(place, "ab", "HEAD", ".", "--call", "work:run", "--timeout", "80000s", cwd=repository)

    def sides(below):
        found = [one for one, said in below.items() if "server.py" in said]
        return found if mark.exists() and len(found) >= 2 else None

    served = _wait(nano, sides)
    _kill({"nano": nano, "fork server": served[0], "side": served[-1]}[victim])
    nano.kill()
    _, alive = psutil.wait_procs([nano, *served], timeout=HANGING_S)
    assert not alive
    assert _start(place, "runs").wait(HANGING_S) == 2  # there is no database
    assert {one.name for one in (place / "temporary").iterdir()} <= {"nanolib-cpu.lock"}
