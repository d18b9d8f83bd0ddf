import json
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.cli.common import EXIT_CLOSED
from nanolib.config import ATTENTION_PATTERNS, PRESETS
from nanolib.experiments import ALL, doctor
from nanolib.measurement import Measurement
from nanolib.meters import ceilings
from nanolib.meters.machine import this_machine
from nanolib.meters.time.latency import summarize
from nanolib.models import attention
from nanolib.models.attention.patterns import DYNAMIC, PATTERNS
from nanolib.run.jobs import import_user_code, plan, scenarios, suites
from nanolib.store import Run, Store


@pytest.fixture
def nano(tmp_path):
    def call(*arguments):
        return CliRunner().invoke(
            main, [*arguments, "--output", str(tmp_path / "out")], env={"NANOLIB_OUTPUT": None}
        )

    return call


def _options(*pairs):
    return [word for pair in pairs for word in ("-p", pair)]


@pytest.mark.parametrize("suite", ["full", "--full"])
def test_a_dry_run_lists_the_cases_and_what_cannot_run_here(nano, tmp_path, suite):
    small = ["seq_lens=[64]", "batch_sizes=[1]", "quality_patterns=[]"]
    options = _options(*small, "attention_types=[{kind: dense, backend: cudnn}]")
    ended = nano("run", suite, "attention", "--dry-run", *options)
    assert ended.exit_code == 0, ended.output
    assert "attention: 5 cases" in ended.output
    assert "unsupported: SDPA backend cudnn has no CPU kernel" in ended.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_doctor_measures_ceilings_that_a_dry_run_then_uses(nano, tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 128})
    monkeypatch.setattr(doctor, "ATTENTION_KINDS", ["dense", "sparse"])  # flex is compiled
    ended = nano("doctor", "--json", "--budget", "0.05")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert "GFLOP/s" in found["peak rates of cpu, measured now"]["float32"]
    assert found["what this machine can measure"]["attention sparse"] == "runs"
    small = ["seq_lens=[64]", "attention_types=[dense]", "quality_patterns=[]", "backward=false"]
    dry = nano("run", "attention", "--dry-run", *_options(*small)).output
    assert "nanolib knows how long a notebook takes after its first run" in dry
    line = next(line for line in dry.splitlines() if "dense" in line)
    assert float(line.split()[-3]) > 0 and line.split()[-1] == "runs"
    with Store(tmp_path / "out" / "results.sqlite") as store:
        assert list(store.runs().status) == ["done"]
    cleaned = nano("clean", "--older-than", "0d").output
    assert "doctor" in cleaned and cleaned.endswith("1 run(s) were deleted\n")
    assert "no runs yet" in nano("runs").output


def test_who_stops_reading_ends_a_command_and_gets_no_verdict(tmp_path):
    with Store(tmp_path / "results.sqlite"):
        pass
    command = [sys.executable, "-m", "nanolib.cli", "runs", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ended:
        ended.stdout.close()
        assert ended.stderr.read() == b"" and ended.wait() == EXIT_CLOSED


@pytest.mark.parametrize("suite", suites())
def test_all_notebooks_of_a_suite_are_looked_through_for_code_of_yours(suite):
    jobs = plan(ALL, [suite], {}, {})
    assert {job.name for job in jobs} == set(ALL)
    import_user_code(jobs)  # the summary, which measures nothing, among them


def test_list_names_all_that_a_command_line_can_name():
    ended = CliRunner().invoke(main, ["list"])
    names = {line.split()[0] for line in ended.output.splitlines() if line.startswith("  ")}
    assert set(ATTENTION_PATTERNS) == {*PATTERNS, *DYNAMIC}
    of_config = {*attention.kinds(), *ATTENTION_PATTERNS, *PRESETS}
    assert names >= {*ALL, *suites(), *scenarios()} | of_config


def test_the_list_of_commands_shows_whole_sentences():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=100).output
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert len(lines) == len(main.commands)
    assert all(line.endswith(".") and not line.endswith("...") for line in lines), shown


@pytest.mark.parametrize("command", main.commands.values(), ids=main.commands)
def test_help_is_short_and_shows_each_default(command):
    for option in command.params:
        if isinstance(option, click.Option):
            summary = option.help.partition(". ")[0]
            assert option.help[0].isupper() and option.help.endswith("."), option.help
            assert len(summary.split()) <= 12, option.help
            default = option.to_info_dict()["default"]
            assert option.show_default or not isinstance(default, int | float | str) or not default


@pytest.mark.parametrize("notebook", ALL)
def test_help_shows_the_parameters_of_the_notebook_that_is_named(notebook):
    ended = CliRunner().invoke(main, ["run", "full", notebook, "--help"])
    fields = ALL[notebook]().Params.model_fields
    lines = [line.strip() for line in ended.output.splitlines()]
    assert ended.exit_code == 0
    for name in fields:
        assert any(line.startswith(f"{name}: ") for line in lines), name


def test_lists_come_as_json_too(nano, tmp_path):
    with Store(tmp_path / "out" / "results.sqlite") as store:
        for at in range(7):
            times = [10.0 + at // 6 * 5 + 0.01 * (i % 7) for i in range(40)]
            rows = {"c": ({"name": "dense"}, [Measurement("case_duration", 1.0), summarize(times)])}
            run = {"label": "before", "git_revision": f"r{at}"}
            store.add(Run("attention", this_machine().to_dict(), rows=rows, **run))
    (*_, last) = json.loads(nano("runs", "--json").stdout)
    assert (last["label"], last["git_revision"]) == ("before", "r6")
    ended = nano("history", "--json")
    (told,) = json.loads(ended.stdout)["shown"]
    assert told["newest"]["after"] == "r6" and len(told["points"]) == 7 and told["case"] == "dense"
    assert "1 level(s) differ in the last one or two runs" in ended.stderr


def test_a_command_that_measures_nothing_starts_without_torch(tmp_path):
    code = """
import contextlib, sys
from nanolib.cli import main
for arguments in (["list"], ["runs"], ["run", "atention"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
    print(arguments, "torch" in sys.modules)
"""
    environment = os.environ | {"NANOLIB_OUTPUT": str(tmp_path)}
    with Store(tmp_path / "results.sqlite"):
        pass
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.count("] False\n") == 3, done.stdout
