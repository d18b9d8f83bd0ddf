import contextlib
import io
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
from types import SimpleNamespace

import click
import psutil
import pytest
from click.testing import CliRunner

from nanolib.ab import spec
from nanolib.ab.schedule import FEWEST_PAIRS, block_calls
from nanolib.ab.spec import Spec
from nanolib.ab.versions import Version, checked_out
from nanolib.cli import main
from nanolib.cli.ab import _agree
from nanolib.measurement import BadInput
from nanolib.report.regressions import ab_ratio, ab_table, ab_verdict
from nanolib.store import Store

from .conftest import WORK

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def ab(tmp_path, monkeypatch):
    monkeypatch.setattr("nanolib.ab.schedule.WARM_UP_S", 0.01)  # the clock is the function's own

    def call(*arguments, budget="3s"):
        rest = ["--budget", budget, "--output", str(tmp_path / "out")]
        return CliRunner().invoke(main, ["ab", *rest, *arguments], env={"NANOLIB_OUTPUT": None})

    return call


def _left_behind():
    return [path.name for path in Path(tempfile.gettempdir()).glob("nanolib-ab-*")]


def _call(ab, tmp_path, a, b, *more, **options):
    ended = ab(a, b, "--call", "work:run", "--json", str(tmp_path / "f.json"), *more, **options)
    assert ended.exit_code in (0, 1), ended.output
    (line,) = json.loads((tmp_path / "f.json").read_text())["lines"]
    return ended, line


def test_a_slower_revision_regressed(repository, ab, tmp_path):
    repository.commit("slow", cost=33_000_000)
    ended, line = _call(
        ab, tmp_path, "base", "slow", "--markdown", str(tmp_path / "f.md"), budget="30s"
    )
    assert ended.exit_code == 1
    assert (line["finding"], line["ratio"]) == ("regressed", pytest.approx(1.1))
    assert (line["base"], line["current"]) == (pytest.approx(30), pytest.approx(33))
    assert "in 20 pairs of processes" in line["message"] and "measured in turns" in ended.output
    assert "| regressed | call | work:run | latency, ms |" in (tmp_path / "f.md").read_text()
    with Store(tmp_path / "out" / "results.sqlite") as store:
        rows = store.measurements(samples=True)
    (row,) = ab_table(rows).to_dict("records")
    assert row["finding"] == "regressed" and "in 20 pairs of processes" in row["message"]
    versions, changed, _ = map(str, ab_verdict(rows))
    assert versions.startswith("A is base (") and changed.startswith("The verdict on work:run")
    assert "work:run" in json.dumps(ab_ratio(rows).to_dict())


def test_a_rate_is_better_when_higher(repository, ab, tmp_path):
    repository.commit("slow", cost=40_000_000)
    ended, line = _call(ab, tmp_path, "base", "slow", "--metric", "tokens_per_second")
    assert ended.exit_code == 1 and line["finding"] == "regressed"
    assert line["ratio"] == pytest.approx(0.75)
    with Store(tmp_path / "out" / "results.sqlite") as store:
        (ratio,) = store.measurements().query("metric == 'ratio'").to_dict("records")
    ends = [ratio[end] for end in ("low", "estimate", "high")]
    assert ends == pytest.approx([4 / 3] * 3)  # of times


def test_equal_versions_run_in_turns_and_in_fresh_processes_and_are_equivalent(
    repository, ab, tmp_path, monkeypatch
):
    # by chance ten pairs are all in one order once in five hundred times
    drawn = cycle([(0, 1), (1, 0)])
    monkeypatch.setattr(random, "Random", lambda: SimpleNamespace(sample=lambda *_: next(drawn)))
    text = (
        WORK
        + f"""
import os
open({str(tmp_path / "imports")!r}, "a").write(f"{{WHO}} {{os.getpid()}}\\n")
calls = open({str(tmp_path / "calls")!r}, "a", buffering=1)
plain = run
def run():
    calls.write(WHO + "\\n")
    plain()
"""
    )
    for who in "AB":
        repository.commit(who, f"WHO = {who!r}\n{text}")
    ended, line = _call(ab, tmp_path, "A", "B")
    assert ended.exit_code == 0
    assert (line["finding"], line["ratio"]) == ("equivalent", pytest.approx(1))

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
        ("import os\n    os._exit(5)", "the process ended with 5"),
    ],
)
def test_what_fails_on_both_sides_is_reported_of_both_and_is_not_new(
    repository, ab, tmp_path, body, said
):
    repository.commit("fails", WORK + f"def fails():\n    {body}\n")
    ended = ab("fails", ".", "--call", "work:fails", "--json", str(tmp_path / "f.json"))
    (line,) = json.loads((tmp_path / "f.json").read_text())["lines"]
    assert ended.exit_code == 0 and line["finding"] == "inconclusive", ended.output
    assert line["message"].startswith("A: ") and line["message"].count(said) == 2


def test_what_fails_in_b_only_fails_the_gate(repository, ab, tmp_path):
    repository.commit("works", WORK + "def fails():\n    run()\n")
    repository.commit("fails", WORK + "def fails():\n    raise ValueError('broken')\n")
    ended = ab("works", "fails", "--call", "work:fails", "--json", str(tmp_path / "f.json"))
    (line,) = json.loads((tmp_path / "f.json").read_text())["lines"]
    assert ended.exit_code == 1 and line["finding"] == "failed", ended.output
    assert "B: error: ValueError: broken" in line["message"]


def test_what_a_call_only_begins_is_refused(repository, ab):
    repository.commit("begins", WORK + "async def only():\n    run()\n")
    ended = ab("begins", ".", "--call", "work:only")
    said = "work:only: a call only starts the work and returns a"
    assert ended.exit_code == 2 and said in ended.output


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "typed", "goes_on"),
    [(300, "", True), (301, "y", True), (301, "", True), (301, "n", False)],
)
def test_a_terminal_is_asked_before_more_than_five_minutes(monkeypatch, seconds, typed, goes_on):
    screen = _Terminal()
    monkeypatch.setattr(sys, "stdin", _Terminal(f"{typed}\n"))
    monkeypatch.setattr(sys, "stderr", screen)
    with contextlib.nullcontext() if goes_on else pytest.raises(click.Abort):
        _agree(seconds)
    assert ("Go on?" in screen.getvalue()) is (seconds > 300)


def test_setup_makes_what_the_function_is_called_with(repository, ab, tmp_path):
    use = "def use(x):\n    assert x == 7\n    print('{\"ms\": 1}')\n    run()\n"
    repository.commit("setup", WORK + "def make():\n    return 7\n" + use)
    ended = ab("setup", ".", "--call", "work:use", "--setup", "work:make")
    assert ended.exit_code == 0 and "1 equivalent" in ended.output


BAD = [
    ("base nowhere --call work:run", "revision: 'nowhere' is not a commit of repository"),
    ("--call work:run -- base --upload-pack=x", "revision: '--upload-pack=x' is not a commit"),
    ("base broken --call work:run", "work:run cannot be imported (SyntaxError"),
    ("base . --call work:walk", "): work:walk: work has no callable 'walk'"),
    ("base . --call json:dumps", "outside this version"),
    ("base . --call work", "--call: 'work' is not a function; write package.module:function"),
    ("base . attention --call work:run", "--call: a function takes no notebook"),
    ("base . --setup work:run", "--setup: 'work:run' needs --call"),
    ("a.yml b.yml", "params: which notebook do a.yml and b.yml belong to?"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_bad_input_is_one_line_exit_code_2_and_leaves_nothing(
    repository, ab, tmp_path, arguments, said
):
    repository.commit("broken", "def run(:\n")
    repository.git("checkout", "--quiet", "base")
    ended = ab(*arguments.split())
    assert ended.exit_code == 2 and said in ended.output
    told = [line for line in ended.output.splitlines() if line.startswith("nano: ")]
    assert len(told) == 1 or "Usage" in ended.output
    assert not (tmp_path / "out").exists()
    assert len(repository.worktrees()) == 1 and not _left_behind()


# Half a minute, unless it is ended.
SLOW = WORK + "import time as t\nreal = run\ndef run():\n    t.sleep(0.02)\n    real()\n"


def test_an_interrupt_removes_worktrees_and_processes(repository, tmp_path):
    repository.commit("slow", SLOW)
    asked = ["ab", "base", "slow", "--call", "work:run", "--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "nanolib.cli", *asked]
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **options)
    assert "A is base" in process.stderr.readline()
    while not psutil.Process(process.pid).children():
        time.sleep(0.01)
    assert len(repository.worktrees()) == 3
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "nano: stopped" in said
    assert len(repository.worktrees()) == 1 and not _left_behind()
    assert not (tmp_path / "out").exists()


def _status(process):
    try:
        return process.status()
    except psutil.NoSuchProcess:  # it ended while we looked
        return psutil.STATUS_DEAD


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere nothing is forked, and nothing halted"
)
def test_a_killed_comparison_leaves_no_process_behind(repository, tmp_path):
    """Its versions are halted in turn; halted for good they would stay for ever."""
    repository.commit("slow", SLOW)
    code = """
from pathlib import Path
from nanolib.ab.run import Settings, Spec, run_ab
run_ab(Spec(("base", "slow"), Path(), functions=["work:run"]), Settings())
"""
    nano = psutil.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    found = []
    while len(found) != 3 or psutil.STATUS_STOPPED not in map(_status, found):
        assert time.monotonic() < deadline
        time.sleep(0.01)
        found = nano.children(recursive=True)
    nano.kill()  # of one process, and the two versions forked from it
    nano.wait()
    _, left = psutil.wait_procs(found, timeout=60)
    assert {_status(child) for child in left} <= {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


def test_a_working_tree_that_was_edited_meanwhile_counts_for_nothing(repository, ab, tmp_path):
    edit = f"    open({str(repository.folder / 'other.py')!r}, 'w').write('x = 1')\n"
    (repository.folder / "work.py").write_text(
        WORK.replace("{cost}", "30_000_000").replace("    now +=", edit + "    now +=")
    )
    ended = ab("base", ".", "--call", "work:run")
    assert ended.exit_code == 2 and "were edited during the measurement" in ended.output
    assert not (tmp_path / "out").exists()


def test_the_repository_is_as_it_was_and_without_one_only_the_working_tree_will_do(repository):
    def state():
        return [repository.git(*one) for one in (["status", "-s"], ["log"], ["branch"])]

    before = state()
    with checked_out(["base", "."], repository.folder) as (a, b):
        assert (a.root / "work.py").is_file() and b.root == repository.folder
    assert before == state()
    outside = repository.folder.parent
    with checked_out([".", "."], outside) as (a, b):
        assert a.root == outside
    with (
        pytest.raises(BadInput, match="is not in a git repository"),
        checked_out(["a", "."], outside),
    ):
        pass


@pytest.mark.notebook
def test_two_params_files_and_a_deterministic_metric(tmp_path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    for name, width in (("a", 16), ("b", 32)):
        text = f"seq_lens: [32]\nnum_heads: 1\nhead_dim: {width}\nattention_types: [dense]\nbackward: false\n"
        (tmp_path / f"{name}.yml").write_text(text)
    files = [str(tmp_path / f"{name}.yml") for name in "ab"]
    ended = CliRunner().invoke(
        main, ["ab", *files, "attention", "--metric", "flops", "--json", str(tmp_path / "f")]
    )
    assert ended.exit_code == 0, ended.output
    lines = json.loads((tmp_path / "f").read_text())["lines"]
    found = {(line["finding"], line["current"] / line["base"]) for line in lines}
    assert found == {("changed", 2.0)}
    assert "each version ran once, in its own process" in ended.output


def test_params_files_with_different_numbers_of_cases_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(spec, "_listed_cases", lambda *_: [{"a": {}}, {"a": {}, "b": {}}])
    files = Spec((".", "."), tmp_path, [("attention", {"seed": 0}, {"seed": 1})])
    versions = [Version(".", "", tmp_path, Path())] * 2
    with pytest.raises(BadInput, match="give 1 and 2 cases"):
        files.tasks(versions, 60)
