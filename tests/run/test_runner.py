"""Run a notebook with `nano run` and with plain papermill."""

import os
import re
import sys

import pytest

from nanolib.paths import checkout
from nanolib.run.prepare import git_revision
from nanolib.store import Store
from tests import processes

SMALL = """
attention_types=[dense] quality_attentions=[] seq_lens=[16] num_heads=2 budget_s=2e-2 backward=false
"""

pytestmark = pytest.mark.notebook


def _plain_papermill(folder, parameters):
    """Run the attention notebook with papermill, from a folder that is not a checkout."""
    notebook = str(checkout() / "notebooks" / "attention.ipynb")
    command = [sys.executable, "-m", "papermill", notebook, "out.ipynb", "--no-progress-bar"]
    command += ["-f", str(checkout() / "params" / "quick" / "attention.yml")]
    for pair in parameters.split():
        command += ["-p", *pair.split("=")]
    return processes.ended(*command, cwd=folder, env=os.environ | {"NANOLIB_OUTPUT": str(folder)})


def test_run_measures_and_reports_and_plain_papermill_continues_the_run(tmp_path):
    folder = tmp_path / "results"
    command = ["run", "attention", "--label", "mine", "--output", folder]
    for pair in SMALL.split():
        command += ["-p", pair]
    ended = processes.invoked(*command)
    assert ended.exit_code == 0, ended.output
    table = re.compile(r"^attention done +3 +3 +— +[0-9.]+$", re.MULTILINE)
    assert table.search(ended.output)
    answer = ended.output.index("When is sparse attention faster?\n  ")  # before the closing table
    assert ended.output.index("attention: done in") < answer < ended.output.index("total s")
    with Store(folder / "results.sqlite") as store:
        (run,) = store.runs().itertuples()
    assert (run.status, run.label, run.suite, run.cases) == ("done", "mine", "quick", 3)
    assert run.params["seq_lens"] == [16] and run.git_revision == git_revision()
    assert set(run.versions) >= {"python", "torch", "platform", "torchao", "nanolib", "sources"}
    assert (folder / "attention.ipynb").exists() and (folder / "report" / "index.html").exists()
    listed = processes.invoked("runs", "--output", folder)
    assert "mine" in listed.output and "done" in listed.output
    ended = _plain_papermill(folder, f"{SMALL} label=mine resume=true")
    assert ended.returncode == 0, ended.stderr
    with Store(folder / "results.sqlite") as store:
        (run,) = store.runs().itertuples()  # all cases were done, so nothing was measured again
    assert (run.status, run.label) == ("done", "mine")
    ended = processes.invoked(*command, "--resume", "--no-report")
    assert ended.exit_code == 0 and table.search(ended.output)


def test_a_bad_parameter_in_plain_papermill_is_one_line(tmp_path):
    ended = _plain_papermill(tmp_path, "seq_lens=[-3]")
    said = "BadInput: attention.seq_lens[0]: Input should be greater than 0, got -3"
    assert ended.returncode != 0 and said in ended.stderr
    assert "Traceback" not in (tmp_path / "out.ipynb").read_text()
    assert not (tmp_path / "results.sqlite").exists()
