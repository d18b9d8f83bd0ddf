"""Run a notebook with `nano run` and with plain papermill."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from papermill.cli import papermill

from nanolib.cli import main
from nanolib.experiments import ALL
from nanolib.run.jobs import notebooks
from nanolib.store import Store

ROOT = Path(__file__).parents[2]
SMALL = {
    "attention_types": "[dense]",
    "quality_patterns": "[]",
    "seq_lens": "[16]",
    "num_heads": "2",
    "budget_s": "2e-2",
    "backward": "false",
}

pytestmark = pytest.mark.notebook


def _options(parameters, form):
    return [word for name, value in parameters.items() for word in form(name, value)]


def _plain_papermill(folder, **parameters):
    """Run the attention notebook with papermill, from a folder that is not a checkout."""
    notebook = str(ROOT / "notebooks" / "attention.ipynb")
    command = [sys.executable, "-m", "papermill", notebook, "out.ipynb", "--no-progress-bar"]
    command += ["-f", str(ROOT / "params" / "quick" / "attention.yml")]
    command += _options(parameters, lambda name, value: ["-p", name, value])
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"NANOLIB_OUTPUT": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_run_measures_and_reports_and_plain_papermill_continues_the_run(tmp_path):
    folder = tmp_path / "results of {label} and {nothing}"
    given = _options(SMALL, lambda name, value: ["-p", f"{name}={value}"])
    command = ["run", "attention", *given, "--label", "mine", "--output", str(folder)]
    ended = CliRunner().invoke(main, command)
    assert ended.exit_code == 0, ended.output
    assert re.search(r"^attention done +3 +3 +— +[0-9.]+ ", ended.output, re.MULTILINE)
    answer = ended.output.index("When is sparse attention faster?\n  ")  # before the closing table
    assert ended.output.index("attention: done in") < answer < ended.output.index("measuring s")
    with Store(folder / "results.sqlite") as store:
        (run,) = store.runs().itertuples()
    assert (run.status, run.label, run.suite) == ("done", "mine", "quick")
    shown = " ".join(ended.output.split())  # lines may be broken
    assert all(f"attention: not a quiet machine: {line}" in shown for line in run.interference)
    assert (folder / "attention.ipynb").exists() and (folder / "report" / "index.html").exists()
    listed = CliRunner().invoke(main, ["runs", "--output", str(folder)])
    assert "mine" in listed.output and "done" in listed.output
    ended = _plain_papermill(folder, **SMALL, label="plain", resume="true")
    assert ended.returncode == 0, ended.stderr
    with Store(folder / "results.sqlite") as store:
        (run,) = store.runs().itertuples()  # all cases were done, so nothing was measured again
    assert (run.status, run.label) == ("done", "plain")


def test_a_bad_parameter_in_plain_papermill_is_one_line(tmp_path):
    ended = _plain_papermill(tmp_path, seq_lens="[-3]")
    said = "BadInput: attention.seq_lens[0]: Input should be greater than 0, got -3"
    assert ended.returncode != 0 and said in ended.stderr
    assert "Traceback" not in (tmp_path / "out.ipynb").read_text()
    assert not (tmp_path / "results.sqlite").exists()


@pytest.mark.parametrize("name", notebooks())
def test_papermill_help_reads_as_help(name):
    ended = CliRunner().invoke(
        papermill, ["--help-notebook", str(ROOT / f"notebooks/{name}.ipynb")]
    )
    assert ended.exit_code == 0 and "Unknown" not in ended.output
    names = re.findall(r"^  (\w+): ", ended.output, re.MULTILINE)
    assert names == [*ALL[name]().Params.MAIN, "settings"]
