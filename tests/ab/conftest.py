import subprocess

import pytest

# The clock of the function under test is the function's own, so that no test times anything: each call says what it cost.
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
        done = subprocess.run(
            ["git", "-C", str(self.folder), *name, *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    def commit(self, tag, text=WORK, **values):
        (self.folder / "work.py").write_text(
            text.replace("{cost}", str(values.get("cost", 30_000_000)))
        )
        self.git("add", "-A")
        self.git("commit", "--quiet", "--allow-empty", "-m", tag)
        self.git("tag", tag)

    def worktrees(self):
        return self.git("worktree", "list").strip().splitlines()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository"
    folder.mkdir()
    made = Repository(folder)
    made.commit("base")
    monkeypatch.chdir(folder)
    return made
