import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from papermill.cli import papermill

from nanolib.experiments import ALL
from nanolib.run.jobs import notebooks
from nanolib.store import Store

ROOT = Path(__file__).parents[2]
NANO = [sys.executable, "-m", "nanolib.cli"]
_ONE_KIND = ["-p", "attention_types=[dense]", "-p", "quality_patterns=[]"]
SMALL = [*_ONE_KIND, "-p", "seq_lens=[16]", "-p", "num_heads=2", "-p", "budget_s=0.02"]
LONG = [*_ONE_KIND, "-p", "seq_lens=[16, 32]", "-p", "budget_s=60", "-p", "rel_ci=1e-9"]

pytestmark = pytest.mark.notebook


def _nano(*arguments, folder, **rest):
    command = [*NANO, *arguments, "--output", str(folder)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300, **rest
    )


def _start(*arguments, folder):
    command = [*NANO, *arguments, "--output", str(folder), "--no-report"]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _kernel(process):
    """The kernel below a running `nano run`, once a case has started."""
    for _ in range(600):
        assert process.poll() is None, process.stdout.read()
        for child in psutil.Process(process.pid).children(recursive=True):
            if "ipykernel_launcher" in " ".join(child.cmdline()):
                return child
        time.sleep(0.1)
    raise AssertionError("no kernel came up")


def _wait_for_a_case(folder):
    for _ in range(600):
        if (folder / "results.sqlite").exists():
            with Store(folder / "results.sqlite") as store:
                rows = store.measurements()
                if "started" in set(rows.status) and "ok" in set(rows.status):
                    return
        time.sleep(0.1)
    raise AssertionError("no case started")


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


def test_ctrl_c_saves_what_is_finished_and_leaves_no_process(tmp_path):
    process = _start("run", "attention", *LONG, folder=tmp_path)
    kernel = _kernel(process)
    _wait_for_a_case(tmp_path)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "stopped by Ctrl-C" in output
    assert not kernel.is_running() or kernel.status() == psutil.STATUS_ZOMBIE
    with Store(tmp_path / "results.sqlite") as store:
        assert store.runs().status.iloc[0] == "interrupted" and store.finished_cases(
            store.runs().run_id.iloc[0]
        )


def _plain_papermill(tmp_path, **parameters):
    """papermill on the attention notebook, from a folder that is no checkout."""
    command = [
        sys.executable,
        "-m",
        "papermill",
        str(ROOT / "notebooks/attention.ipynb"),
        "out.ipynb",
    ]
    for name, value in parameters.items():
        command += ["-p", name, value]
    return subprocess.run(
        [*command, "--no-progress-bar"],
        cwd=tmp_path,
        env=os.environ | {"NANOLIB_OUTPUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
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
    assert (
        ended.returncode != 0
        and "BadInput: attention.seq_lens[0]: Input should be greater than 0, got -3"
        in ended.stderr
    )
    assert "Traceback" not in (tmp_path / "out.ipynb").read_text()
    assert not (tmp_path / "results.sqlite").exists()
