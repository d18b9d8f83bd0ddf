"""Jobs run one after another on a machine that may be busy, and Ctrl-C ends the last of them."""

import shutil
from types import SimpleNamespace

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import RunStatus
from nanolib.run import notebooks
from nanolib.run.jobs import plan
from tests.store.rows import make_run

SCENARIOS = ["distributed-memory", "distributed-million-tokens", "distributed-which-algorithm"]
BUSY = "not a quiet machine: others use cpu"


def test_a_command_says_once_what_is_in_its_way_and_ctrl_c_starts_no_other_job(
    tmp_path, monkeypatch
):
    begun, said = [], []

    def run(job, command, watch):
        begun.append(job.title)
        watch(), watch()
        if len(begun) == 2:
            raise KeyboardInterrupt
        return 1

    monkeypatch.setattr(notebooks, "find_interference", lambda device: [f"others use {device}"])
    monkeypatch.setattr(notebooks, "lock_owner", lambda device, ours: "process 7 (model)")
    monkeypatch.setattr(notebooks, "_run_papermill", run)
    monkeypatch.setattr(notebooks, "_judge", lambda result, *_: setattr(result, "status", "failed"))
    jobs = plan(ALL, SCENARIOS, {}, {})
    results = notebooks.run_jobs(jobs, notebooks.Command(tmp_path), said.append)
    assert begun == SCENARIOS[:2] and said[0] == BUSY
    statuses = [result.status for result in results]
    assert statuses == [RunStatus.FAILED, RunStatus.INTERRUPTED, "not started"]
    waits = "waiting for cpu: in use by process 7 (model)"
    assert [line for line in said if waits in line] == [f"{one}: {waits}" for one in begun]
    summary = plan(ALL, ["summary"], {}, {})  # it measures nothing
    said.clear()
    notebooks.run_jobs(summary, notebooks.Command(tmp_path), said.append)
    assert said and BUSY not in said


@pytest.mark.parametrize(
    ("code", "message", "free", "said"),
    [
        (0, "", 2**30, "the notebook ended before its last cell marked the run as done"),
        (138, "", 2**30, "the kernel died, perhaps because memory ran out; see "),
        (1, "", 2**30, "the process exited with code 1: BadInput: one line"),
        (-9, "", 2**30, "the process was killed by SIGKILL"),
        (1, "the run says why", 0, "the run says why"),
        (1, "", 0, "the disk is full; free space, and run again with --resume"),
    ],
)
def test_a_job_that_is_not_done_says_why(tmp_path, monkeypatch, store, code, message, free, said):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    (tmp_path / "log").write_text("Traceback\nBadInput: one line\n")
    result = notebooks.NotebookResult("attention", cases=2, run_id=store.add(make_run(rows={})))
    store.update_run(result.run_id, message=message)
    notebooks._judge(result, code, store, tmp_path / "log")
    assert result.status == RunStatus.FAILED and result.message.startswith(said)
