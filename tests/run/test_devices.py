import dataclasses
import threading
from types import SimpleNamespace

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import RunStatus
from nanolib.meters import machine
from nanolib.run import jobs, lock, notebooks
from nanolib.run.jobs import plan

PLACES = [{jobs.VISIBLE: "GPU-a"}, {jobs.VISIBLE: "GPU-b"}]
SMALL = {"seq_lens": [16, 32, 48, 64], "attention_types": ["dense"], "quality_patterns": []}


SCENARIOS = [
    f"distributed-{name}"
    for name in ("long-prefill", "memory", "million-tokens", "which-algorithm")
]


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(notebooks, "gpu_places", lambda: PLACES)
    monkeypatch.setattr(notebooks, "on_any_gpu", lambda job: job.name != "summary")


def _jobs():
    return [*plan(ALL, SCENARIOS, {}, {}), *plan(ALL, ["summary"], {}, {})]


def _run_jobs(tmp_path):
    return notebooks.run_jobs(_jobs(), notebooks.Command(tmp_path), lambda line: None)


def test_jobs_that_any_gpu_can_do_run_on_all_of_them_at_once_and_the_others_after(
    tmp_path, monkeypatch, two_gpus
):
    together, seen = threading.Barrier(2, timeout=30), []

    def run(job, command, place, stop, watch):
        if place:
            together.wait()  # passes only while another is at work
        seen.append((job.title, place.get(jobs.VISIBLE)))
        return 0

    monkeypatch.setattr(notebooks, "_run_papermill", run)
    monkeypatch.setattr(notebooks, "_judge", lambda end, *_: setattr(end, "status", RunStatus.DONE))
    ended = _run_jobs(tmp_path)
    assert [end.status for end in ended] == [RunStatus.DONE] * 5
    assert {title for title, place in seen if place} == {*SCENARIOS}
    assert {place for _, place in seen if place} == {"GPU-a", "GPU-b"}
    assert seen[4] == ("summary", None)


def test_ctrl_c_ends_those_that_run_and_starts_no_other(tmp_path, monkeypatch, two_gpus):
    begun = []

    def run(job, command, place, stop, watch):
        begun.append(job.title)
        stop.set()  # as Ctrl-C does
        return -9

    monkeypatch.setattr(notebooks, "_run_papermill", run)
    statuses = [end.status for end in _run_jobs(tmp_path)]
    assert 1 <= len(begun) <= 2
    assert statuses.count(RunStatus.INTERRUPTED) == len(begun)
    assert statuses.count("not started") == 5 - len(begun)


@pytest.mark.parametrize(
    ("values", "any_gpu"),
    [
        ({"device": "auto"}, True),
        ({"device": "cuda"}, True),
        ({"device": "cuda:1"}, False),
        ({"device": "cpu"}, False),
        ({"device": "auto", "world_sizes": [1, 2]}, False),
        ({"device": "auto", "world_sizes": [1]}, True),
        ({}, False),
    ],
)
def test_which_jobs_any_gpu_can_do(monkeypatch, values, any_gpu):
    monkeypatch.setattr(
        machine, "resolve_device", lambda name: "cpu" if name == "cpu" else "cuda:0"
    )
    job = dataclasses.replace(_jobs()[0], params=SimpleNamespace(**values))
    assert jobs.on_any_gpu(job) is any_gpu


def test_a_gpus_lock_is_the_same_under_whichever_number_it_has(monkeypatch):
    monkeypatch.setattr(
        machine, "gpu_uuid", lambda device: {"cuda:0": "GPU-a", "cuda:1": "GPU-b"}[device]
    )
    assert lock.lock_path("cuda:1").name == "nanolib-GPU-b.lock" != lock.lock_path("cuda:0").name
    # the other is hidden from this process
    monkeypatch.setattr(machine, "gpu_uuid", lambda device: {"cuda:0": "GPU-b"}[device])
    assert lock.lock_path("cuda:0").name == "nanolib-GPU-b.lock"
    assert lock.lock_path("cpu").name == "nanolib-cpu.lock"
