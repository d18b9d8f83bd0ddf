import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from papermill.cli import papermill

from nanolib.experiments import ALL
from nanolib.run.jobs import notebooks
from nanolib.store import Store

ROOT = Path(__file__).parents[2]
SMALL = ["-p", "attention_types=[dense]", "-p", "quality_patterns=[]", "-p", "seq_lens=[16]"]
SMALL += ["-p", "num_heads=2", "-p", "budget_s=0.02"]

pytestmark = pytest.mark.notebook


def _nano(*arguments, folder):
    command = [sys.executable, "-m", "nanolib.cli", *arguments, "--output", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_run_measures_reports_and_says_where_the_time_went(tmp_path):
    tmp_path /= "results of {label} and {nothing}"
    tmp_path.mkdir()
    ended = _nano("run", "attention", *SMALL, "--label", "mine", folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^attention done +3 +3 +— +[0-9.]+ ", ended.stdout, re.MULTILINE)
    answer = ended.stdout.index("When is sparse attention faster?\n  ")  # before the closing table
    assert ended.stdout.index("attention: done in") < answer < ended.stdout.index("measuring s")
    with Store(tmp_path / "results.sqlite") as store:
        (run,) = store.runs().itertuples()
    assert (run.status, run.label, run.suite) == ("done", "mine", "quick")
    shown = " ".join(ended.stdout.split())  # lines may be broken
    assert all(f"attention: not a quiet machine: {line}" in shown for line in run.interference)
    assert (tmp_path / "attention.ipynb").exists() and (tmp_path / "report" / "index.html").exists()
    listed = _nano("runs", folder=tmp_path)
    assert "mine" in listed.stdout and "done" in listed.stdout
    again = _nano("run", "attention", *SMALL, "--resume", "--no-report", folder=tmp_path)
    assert again.returncode == 0
    with Store(tmp_path / "results.sqlite") as store:
        assert len(store.runs()) == 1  # all was done: nothing was measured again


def _plain_papermill(tmp_path, **parameters):
    """papermill on the attention notebook, from a folder that is no checkout."""
    notebook = str(ROOT / "notebooks" / "attention.ipynb")
    command = [sys.executable, "-m", "papermill", notebook, "out.ipynb", "--no-progress-bar"]
    for name, value in parameters.items():
        command += ["-p", name, value]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"NANOLIB_OUTPUT": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_plain_papermill_works_from_any_folder(tmp_path):
    ended = _plain_papermill(
        tmp_path, seq_lens="[16]", attention_types="[dense]", budget_s="2e-2", label="plain"
    )
    assert ended.returncode == 0, ended.stderr
    with Store(tmp_path / "results.sqlite") as store:
        assert list(store.runs().label) == ["plain"] and list(store.runs().status) == ["done"]


@pytest.mark.parametrize("name", notebooks())
def test_papermill_help_reads_as_help(name):
    ended = CliRunner().invoke(
        papermill, ["--help-notebook", str(ROOT / f"notebooks/{name}.ipynb")]
    )
    assert ended.exit_code == 0 and "Unknown" not in ended.output
    names = re.findall(r"^  (\w+): ", ended.output, re.MULTILINE)
    assert names == [*ALL[name]().Params.MAIN, "settings"]


def test_a_bad_parameter_in_plain_papermill_is_one_line(tmp_path):
    ended = _plain_papermill(tmp_path, seq_lens="[-3]")
    said = "BadInput: attention.seq_lens[0]: Input should be greater than 0, got -3"
    assert ended.returncode != 0 and said in ended.stderr
    assert "Traceback" not in (tmp_path / "out.ipynb").read_text()
    assert not (tmp_path / "results.sqlite").exists()
