"""Jobs run one after another, and Ctrl-C ends the last of them."""

from nanolib.experiments import ALL
from nanolib.measurement import RunStatus
from nanolib.run import notebooks
from nanolib.run.jobs import plan

SCENARIOS = ["distributed-memory", "distributed-million-tokens", "distributed-which-algorithm"]


def test_ctrl_c_ends_the_job_that_runs_and_starts_no_other(tmp_path, monkeypatch):
    begun = []

    def run(job, command, watch):
        begun.append(job.title)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return 1

    monkeypatch.setattr(notebooks, "_run_papermill", run)
    monkeypatch.setattr(notebooks, "_judge", lambda result, *_: setattr(result, "status", "failed"))
    command = notebooks.Command(tmp_path)
    results = notebooks.run_jobs(plan(ALL, SCENARIOS, {}, {}), command, lambda line: None)
    assert begun == SCENARIOS[:2]
    statuses = [result.status for result in results]
    assert statuses == [RunStatus.FAILED, RunStatus.INTERRUPTED, "not started"]


def test_the_first_line_of_a_command_says_that_the_machine_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "find_interference", lambda device: [f"others use {device}"])
    monkeypatch.setattr(notebooks, "run_job", lambda *_: None)
    jobs = plan(
        ALL,
        ["attention"],
        {"seq_lens": [16], "attention_types": ["dense"], "quality_patterns": []},
        {},
    )
    said = []
    notebooks.run_jobs(jobs, notebooks.Command(tmp_path), said.append)
    assert said[0] == "not a quiet machine: others use cpu"
    said.clear()
    summary = plan(ALL, ["summary"], {}, {})
    notebooks.run_jobs(summary, notebooks.Command(tmp_path), said.append)
    assert "not a quiet machine: others use cpu" not in said  # the summary measures nothing
