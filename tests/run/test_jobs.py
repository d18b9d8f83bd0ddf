"""Jobs run one after another on a machine that may be busy, and Ctrl-C ends the last of them."""

from nanolib.experiments import ALL
from nanolib.measurement import RunStatus
from nanolib.run import notebooks
from nanolib.run.jobs import plan

SCENARIOS = ["distributed-memory", "distributed-million-tokens", "distributed-which-algorithm"]
BUSY = "not a quiet machine: others use cpu"


def test_a_command_says_first_that_the_machine_is_busy_and_ctrl_c_starts_no_other_job(
    tmp_path, monkeypatch
):
    begun, said = [], []

    def run(job, command, watch):
        begun.append(job.title)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return 1

    monkeypatch.setattr(notebooks, "find_interference", lambda device: [f"others use {device}"])
    monkeypatch.setattr(notebooks, "_run_papermill", run)
    monkeypatch.setattr(notebooks, "_judge", lambda result, *_: setattr(result, "status", "failed"))
    jobs = plan(ALL, SCENARIOS, {}, {})
    results = notebooks.run_jobs(jobs, notebooks.Command(tmp_path), said.append)
    assert begun == SCENARIOS[:2] and said[0] == BUSY
    statuses = [result.status for result in results]
    assert statuses == [RunStatus.FAILED, RunStatus.INTERRUPTED, "not started"]
    summary = plan(ALL, ["summary"], {}, {})  # it measures nothing
    said.clear()
    notebooks.run_jobs(summary, notebooks.Command(tmp_path), said.append)
    assert said and BUSY not in said
