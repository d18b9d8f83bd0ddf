"""Jobs run one after another on a machine that may be busy, and Ctrl-C ends the last of them."""

from contextlib import contextmanager

import nbformat
import pytest

from nanolib.experiments import ALL
from nanolib.measurement import RunStatus
from nanolib.params import plan_jobs
from nanolib.paths import DATABASE
from nanolib.run import notebooks
from nanolib.run.process import Died, call_in_process, execute
from nanolib.store import Store
from tests.store.rows import make_run

SCENARIOS = ["distributed-memory", "distributed-million-tokens", "distributed-which-algorithm"]


def test_a_command_says_once_what_is_in_its_way_and_ctrl_c_starts_no_other_job(
    tmp_path, monkeypatch
):
    begun, said = [], []

    @contextmanager
    def locked(device, what, log):
        log(f"waiting for {device} before {what}")
        yield

    def run(job, command, watch):
        begun.append(job.title)
        with Store(command.output / DATABASE) as store:
            store.add(make_run(job.title, launch=command.launch(job.title), interference=["busy"]))
        watch(), watch()
        if len(begun) == 2:
            raise KeyboardInterrupt
        return "why"

    monkeypatch.setattr(notebooks, "find_interference", lambda device: [f"others use {device}"])
    monkeypatch.setattr(notebooks, "device_lock", locked)
    monkeypatch.setattr(notebooks, "_run_papermill", run)
    monkeypatch.setattr(notebooks, "_judge", lambda result, *_: setattr(result, "status", "failed"))
    jobs = plan_jobs(ALL, SCENARIOS, {}, {})
    results = notebooks.run_jobs(jobs, notebooks.Command(tmp_path), said.append)
    assert begun == SCENARIOS[:2] and said[0] == "not a quiet machine: others use cpu"
    assert not [line for line in said[1:] if "quiet machine" in line]
    assert [result.status for result in results] == [
        RunStatus.FAILED,
        RunStatus.INTERRUPTED,
        "not started",
    ]
    waits = [line for line in said if line.startswith("waiting")]
    assert waits == [f"waiting for cpu before {title}" for title in begun]
    summary = plan_jobs(ALL, ["summary"], {}, {})  # it measures nothing
    said.clear()
    notebooks.run_jobs(summary, notebooks.Command(tmp_path), said.append)
    assert said and not [line for line in said if "quiet" in line or "waiting" in line]


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("", "", "the notebook ended before its last cell marked the run as done"),
        ("Kernel died", "", "Kernel died"),
        ("Kernel died", "the run says why", "the run says why"),
    ],
)
def test_a_job_that_is_not_done_says_why(store, reason, message, said):
    result = notebooks.NotebookResult("attention", cases=2, run_id=store.add(make_run(rows={})))
    store.update_run(result.run_id, message=message)
    notebooks._judge(result, reason, store)
    assert result.status == RunStatus.FAILED and result.message == said


@pytest.mark.notebook
def test_a_cell_that_fails_ends_the_notebook_with_its_message(tmp_path):
    paths = [tmp_path / f"{name} {{label}}.ipynb" for name in ("source", "target")]
    kernel = {"name": "python3", "language": "python", "display_name": "Python"}
    cells = [nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), paths[0])
    with pytest.raises(Died, match=r"^ZeroDivisionError: division"):
        list(call_in_process(execute, *paths, {"a": 1}, {}, limit_s=300, log=tmp_path / "log"))
    assert "1 / 0" in (tmp_path / "log").read_text() and paths[1].exists()
