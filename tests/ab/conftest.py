"""A git repository with versions of a function, and `nano ab` to compare them."""

import json

import pytest

from nanolib import paths
from tests.processes import invoked

# The function under test has its own clock, so that no test times anything: a call says its time.
WORK = """
import time

now = 0

def run():
    global now
    now += {cost}

time.perf_counter_ns = lambda: now
"""


class Repository:
    def __init__(self, folder):
        self.folder = folder
        self.git("init", "--quiet")

    def git(self, *arguments):
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return paths.git(self.folder, *name, *arguments)

    def commit(self, tag, text=WORK, cost=30_000_000):
        (self.folder / "work.py").write_text(text.replace("{cost}", str(cost)))
        self.git("add", "-A")
        self.git("commit", "--quiet", "--allow-empty", "-m", tag)
        self.git("tag", tag)

    def worktrees(self):
        return self.git("worktree", "list").splitlines()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    made = Repository(folder)
    made.commit("base")
    monkeypatch.chdir(folder)
    return made


@pytest.fixture
def ab(tmp_path, monkeypatch):
    """Run `nano ab`, which writes its findings into `f.json`."""
    monkeypatch.setattr("nanolib.ab.schedule.WARM_UP_S", 0.01)  # the clock is the function's own

    def call(*arguments, budget="3s"):
        monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path / "out"))
        return invoked("ab", "--budget", budget, "--json", tmp_path / "f.json", *arguments)

    return call


@pytest.fixture
def compared(ab, tmp_path):
    """Compare two versions of a function, and return the end of `nano ab` and its only line."""

    def call(*arguments, function="run", **budget):
        ended = ab(*arguments, "--call", f"work:{function}", **budget)
        (line,) = json.loads((tmp_path / "f.json").read_text())["lines"]
        return ended, line

    return call
