import json
import os
import subprocess
import sys

import pytest

from nanolib.cli.common import EXIT_CLOSED
from nanolib.config import ATTENTION_PATTERNS, PRESETS
from nanolib.experiments import ALL, doctor
from nanolib.models import attention
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.params import plan_jobs
from nanolib.paths import SCENARIOS, params_files
from nanolib.run import peaks
from nanolib.store import Store
from tests.processes import ended, invoked


@pytest.fixture
def nano(tmp_path):
    def call(*arguments):
        return invoked(*arguments, "--output", tmp_path / "out")

    return call


@pytest.mark.slow
def test_doctor_measures_ceilings_that_a_dry_run_then_uses(nano, monkeypatch):
    monkeypatch.setattr(peaks, "_MATRIX", {"cpu": 128})
    monkeypatch.setattr(doctor, "ATTENTION_KINDS", ["dense", "sparse"])  # flex is compiled
    found = nano("doctor", "--json", "--budget", "0.05")
    assert found.exit_code == 0, found.output
    shown = json.loads(found.stdout)
    assert "GFLOP/s" in shown["peak rates of cpu, measured now"]["float32"]
    assert shown["what this machine can measure"]["attention sparse"] == "runs"
    small = ["-pattention_types=[dense, {kind: dense, backend: cudnn}]", "-pbackward=false"]
    small += ["-pseq_lens=[64]", "-pquality_attentions=[]"]
    dry = nano("run", "--full", "attention", "--dry-run", *small, "-pbatch_sizes=[1]").output
    assert "attention: 7 cases" in dry
    assert "unsupported: SDPA backend cudnn has no CPU kernel" in dry
    line = next(line for line in dry.splitlines() if "dense" in line)
    assert float(line.split()[-3]) > 0 and line.split()[-1] == "runs"
    (run,) = json.loads(nano("runs", "--json").stdout)
    assert (run["experiment"], run["status"]) == ("doctor", "done")


def test_who_stops_reading_ends_a_command_and_gets_no_verdict(tmp_path):
    with Store(tmp_path / "results.sqlite"):
        pass
    command = [sys.executable, "-m", "nanolib.cli", "runs", "--output", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as runs:
        runs.stdout.close()
        assert runs.stderr.read() == b"" and runs.wait() == EXIT_CLOSED


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("libx.so: cannot open"), "OSError: libx.so: cannot open"),  # not of a file
        # The pipe of another process: no reader of the output has ended.
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_an_error_of_a_library_or_a_process_is_one_line(nano, monkeypatch, error, said):
    def examine(*_):
        raise error

    monkeypatch.setattr(doctor, "examine", examine)
    found = nano("doctor")
    assert found.exit_code == 2 and found.output == f"nano: {said}\n"


def test_a_suite_has_all_notebooks_and_one_that_is_named_twice_runs_once():
    for folder in params_files():
        jobs = plan_jobs(ALL, [folder], {}, {})
        assert {job.name for job in jobs} == ({"distributed"} if folder == SCENARIOS else {*ALL})
    named = ["quick", "attention", "model", "attention"]
    assert [job.name for job in plan_jobs(ALL, named, {}, {})] == ["attention", "model"]
    scenario = next(iter(params_files()[SCENARIOS]))
    assert [job.title for job in plan_jobs(ALL, [scenario] * 2, {}, {})] == [scenario]


def test_list_names_all_that_a_command_line_can_name():
    found = invoked("list")
    names = {line.split()[0] for line in found.output.splitlines() if line.startswith("  ")}
    assert set(ATTENTION_PATTERNS) == {*PATTERNS, *CHOOSERS}
    of_config = {*attention.kinds(), *ATTENTION_PATTERNS, *PRESETS}
    assert names >= {*ALL, *params_files()[SCENARIOS], "quick", "full"} | of_config


@pytest.mark.parametrize("notebook", ALL)
def test_help_shows_the_parameters_of_the_notebook_that_is_named(notebook):
    found = invoked("run", "full", notebook, "--help")
    shown = {line.strip().partition(": ")[0].strip('"') for line in found.output.splitlines()}
    assert found.exit_code == 0 and {*ALL[notebook]().Params.model_fields} <= shown


def test_a_command_that_measures_nothing_starts_without_what_takes_long_to_import(tmp_path):
    code = """
import contextlib, sys
from nanolib.cli import main
import nanolib.store
print(*{"torch", "pandas", "pydantic", "scipy", "altair"} & {*sys.modules})
for arguments in (["list"], ["runs"], ["run", "atention"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
    print(arguments, "torch" in sys.modules)
"""
    environment = os.environ | {"NANOLIB_OUTPUT": str(tmp_path)}
    with Store(tmp_path / "results.sqlite"):
        pass
    done = ended(sys.executable, "-c", code, env=environment)
    assert done.stdout.startswith("\n") and done.stdout.count("] False\n") == 3, done.stdout
