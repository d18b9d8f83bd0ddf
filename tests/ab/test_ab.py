"""Compare two versions from the command line, and leave the repository as it was."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

import click
import psutil
import pytest

from nanolib.ab import run
from nanolib.ab.run import Spec
from nanolib.ab.schedule import FEWEST_PAIRS, block_calls
from nanolib.ab.versions import Version, checked_out
from nanolib.cli.compare import _agree
from nanolib.measurement import BadInput
from nanolib.paths import checkout

from .conftest import WORK, Repository

pytestmark = pytest.mark.slow


def _is_clean(repository):
    made = [*Path(tempfile.gettempdir()).glob("nanolib-ab-*")]
    return len(repository.worktrees()) == 1 and not made


def test_equal_versions_run_in_turns_and_in_fresh_processes_and_are_equivalent(
    repository, compared, tmp_path, monkeypatch
):
    # by chance ten pairs are all in one order once in five hundred times
    drawn = cycle([(0, 1), (1, 0)])
    monkeypatch.setattr(random, "sample", lambda *_: next(drawn))
    text = f"""
import os
open({str(tmp_path / "imports")!r}, "a").write(f"{{WHO}} {{os.getpid()}}\\n")
calls = open({str(tmp_path / "calls")!r}, "a", buffering=1)
plain = run
def run():
    calls.write(WHO + "\\n")
    plain()
"""
    for who in "AB":
        repository.commit(who, f"WHO = {who!r}\n{WORK}{text}")
    ended, line = compared("A", "B")
    assert ended.exit_code == 0
    assert (line["finding"], line["verdict"]["ratio"]) == ("equivalent", pytest.approx(1))

    pairs = int(re.search(r"(\d+) pairs of processes", line["message"]).group(1))
    imported = (tmp_path / "imports").read_text().splitlines()
    assert len(imported) == len(set(imported)) == 2 * pairs >= 4

    block = block_calls(30.0)
    calls = (tmp_path / "calls").read_text().replace("\n", "")[-2 * FEWEST_PAIRS * block :]
    blocks = {calls[at : at + 2 * block] for at in range(0, len(calls), 2 * block)}
    assert blocks == {"A" * block + "B" * block, "B" * block + "A" * block}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('two\\nlines')", "error: ValueError: two lines"),
        ("import os\n    os._exit(5)", "the process exited with code 5"),
    ],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_failure_is_a_regression_only_if_it_is_new_and_nothing_compared_is_no_pass(
    repository, compared, body, said, is_new
):
    for tag, text in (("A", "run()" if is_new else body), ("B", body)):
        repository.commit(tag, f"{WORK}def fails():\n    {text}\n")
    ended, line = compared("A", "B", function="fails")
    assert ended.exit_code == (1 if is_new else 2)
    assert line["finding"] == ("failed" if is_new else "inconclusive")
    assert line["message"].startswith("B: " if is_new else "A: ")
    assert line["message"].count(said) == 2 - is_new


def test_a_terminal_is_asked_before_more_than_five_minutes(monkeypatch):
    asked = []
    monkeypatch.setattr(click, "confirm", lambda question, **_: asked.append(question))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    _agree(300)
    assert not asked
    _agree(301)
    assert asked == ["Continue?"]


def test_setup_makes_what_the_function_is_called_with(repository, compared):
    use = "def use(x):\n    assert x == 7\n    print('{\"ms\": 1}')\n    run()\n"
    repository.commit("setup", f"{WORK}def make():\n    return 7\n{use}")
    _, line = compared("setup", ".", "--setup", "work:make", function="use")
    assert line["finding"] == "equivalent"


BAD = {
    "--call work:run -- base --upload-pack=x": "revision: '--upload-pack=x' is not a commit",
    "base broken --call work:run": "work:run cannot be imported (SyntaxError",
    "base . --call work:walk": "): work:walk: work has no callable 'walk'",
    "begins begins --call work:only": "work:only: a call only starts the work and returns a",
    "base . --call json:dumps": "outside this version",
    "base . attention --call work:run": "--call: cannot be combined with a notebook",
    "base . --setup work:run": "--setup: 'work:run' needs --call",
}


@pytest.mark.parametrize(("arguments", "said"), BAD.items())
def test_bad_input_is_one_line_exit_code_2_and_leaves_nothing(
    repository, ab, tmp_path, arguments, said
):
    repository.commit("begins", f"{WORK}async def only():\n    run()\n")
    repository.commit("broken", "def run(:\n")
    repository.git("checkout", "--quiet", "base")
    ended = ab(*arguments.split())
    assert ended.exit_code == 2 and said in ended.output
    assert len([line for line in ended.output.splitlines() if line.startswith("nano: ")]) == 1
    assert _is_clean(repository) and not (tmp_path / "out").exists()


def test_a_submodule_is_part_of_each_version(repository, tmp_path, compared, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    theirs = Repository(other)
    theirs.commit("first")
    # By default, git clones a submodule only from another machine.
    for name, value in {"COUNT": "1", "KEY_0": "protocol.file.allow", "VALUE_0": "always"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    repository.git("submodule", "--quiet", "add", str(other), "theirs")
    repository.commit(
        "with", "from theirs import work\nfrom theirs.work import *\ntime = work.time\n"
    )
    theirs.commit("second", cost=33_000_000)
    _, line = compared("with", ".")
    assert line["finding"] == "equivalent", line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_worktrees_and_processes(repository, tmp_path, number):
    # Half a minute, unless it is ended.
    slow = "import time as t\nreal = run\ndef run():\n    t.sleep(0.02)\n    real()\n"
    repository.commit("slow", f"{WORK}{slow}")
    command = [sys.executable, "-m", "nanolib.cli", "ab", "base", "slow", "--call", "work:run"]
    nano = psutil.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert "A is base" in nano.stderr.readline()
    while not nano.children():
        time.sleep(0.01)
    assert len(repository.worktrees()) == 3
    os.killpg(nano.pid, number)
    _, said = nano.communicate(timeout=60)
    assert nano.returncode == 130 and "nano: stopped" in said
    assert _is_clean(repository) and not (tmp_path / "out").exists()


def test_a_working_tree_that_was_edited_meanwhile_counts_for_nothing(repository, ab, tmp_path):
    edit = f"open({str(repository.folder / 'work.py')!r}, 'a').write('x = 1\\n')"
    text = WORK.replace("{cost}", "30_000_000").replace("global now", f"global now\n    {edit}")
    repository.commit("edits", text)
    ended = ab("base", ".", "--call", "work:run")
    assert ended.exit_code == 2 and "were edited during the measurement" in ended.output
    assert not (tmp_path / "out").exists()


def test_the_repository_stays_as_it_is_in_a_git_hook_too_and_without_one_git_says_so(
    repository, monkeypatch
):
    index = repository.folder / ".git" / "index"

    def state():
        told = [repository.git(*one) for one in (["status", "-s"], ["log"], ["branch"])]
        return told, index.read_bytes()

    repository.commit("new", cost=1)
    before = state()
    with monkeypatch.context() as hook:
        hook.setenv("GIT_DIR", ".git")
        hook.setenv("GIT_INDEX_FILE", str(index))
        with checked_out(["base", "."], repository.folder) as (base, now):
            assert "now += 30000000" in (base.root / "work.py").read_text()
            assert now.root == repository.folder
    assert before == state()
    with pytest.raises(BadInput, match="git rev-parse: fatal: not a git repository"):
        checked_out([".", "."], repository.folder.parent).__enter__()


@pytest.mark.notebook
def test_a_case_of_a_notebook_is_timed_in_both_versions(ab, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout())
    small = ["seq_lens=[32]", "attention_types=[dense]", "backward=false", "quality_attentions=[]"]
    ended = ab(".", ".", "attention", *(f"-p{one}" for one in small))
    assert ended.exit_code in (0, 1), ended.output  # two pairs of processes decide little
    lines = json.loads((tmp_path / "f.json").read_text())["lines"]
    assert {line["metric"] for line in lines} == {"latency forward"}
    assert all("pairs of processes" in line["message"] for line in lines)


def test_a_case_of_one_version_is_a_finding(tmp_path, monkeypatch):
    of_a, of_b = ({name: {"name": name} for name in names} for names in ("ab", "cbd"))
    monkeypatch.setattr(run, "_list_cases", lambda *_: [of_a, of_b])
    versions = [Version(".", "", tmp_path, Path(), tmp_path)] * 2
    (task,), lines = Spec((".", "."), tmp_path, [("attention", {})]).tasks(versions)
    assert (task.experiment, task.case_id) == ("attention", "b")
    assert task.request["case_id"] == "b"
    assert [(line.case, line.finding, line.message) for line in lines] == [
        ("a", "missing", "B does not have this case"),
        ("c", "new", "A does not have this case"),
        ("d", "new", "A does not have this case"),
    ]
