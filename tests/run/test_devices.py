import dataclasses
import threading
from types import SimpleNamespace

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import RunStatus
from nanolib.meters import machine
from nanolib.run import lock
from nanolib.run.suite import devices, runner
from nanolib.run.suite.jobs import in_parts, plan

PLACES = [{devices.VISIBLE: "GPU-a"}, {devices.VISIBLE: "GPU-b"}]
SMALL = {"seq_lens": [16, 32, 48, 64], "attention_types": ["dense"], "quality_patterns": []}


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(runner, "gpu_places", lambda: PLACES)
    monkeypatch.setattr(runner, "on_any_gpu", lambda job: job.name == "attention")


def test_jobs_that_any_gpu_can_do_run_on_all_of_them_at_once_and_the_others_after(
    tmp_path, monkeypatch, two_gpus
):
    together, seen = threading.Barrier(2, timeout=30), []

    def run(job, end, shared, place, store, log):
        if place:
            together.wait()  # passes only while another is at work
        seen.append((job.title, place.get(devices.VISIBLE), log.name))
        end.status = RunStatus.DONE

    monkeypatch.setattr(runner, "_run", run)
    jobs = in_parts(_jobs(), 4)
    ended, _ = runner.run_jobs(jobs, tmp_path, lambda line: None)
    assert [end.status for end in ended] == [RunStatus.DONE] * len(jobs)
    on_gpus = [(title, place) for title, place, _ in seen if place]
    assert {title for title, _ in on_gpus} == {f"attention-{part}-of-4" for part in range(1, 5)}
    assert {place for _, place in on_gpus} == {"GPU-a", "GPU-b"}
    assert (
        len({log for _, place, log in seen if place}) == 4
    )  # each its own: one that fails is told by its last line
    assert all(place is None for _, place, _ in seen[4:]) and len(seen) == len(jobs)


def _jobs():
    return [*plan(ALL, ["attention"], SMALL, {}), *plan(ALL, ["summary"], {}, {})]


def test_ctrl_c_ends_those_that_run_and_starts_no_other(tmp_path, monkeypatch, two_gpus):
    begun = []

    def run(job, end, shared, place, store, log):
        begun.append(job.title)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_run", run)
    ended, _ = runner.run_jobs(in_parts(_jobs(), 4), tmp_path, lambda line: None)
    assert 1 <= len(begun) <= 2
    statuses = [end.status for end in ended]
    assert statuses.count(RunStatus.INTERRUPTED) == len(begun) and statuses.count(
        "not started"
    ) == 5 - len(begun)


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
        devices, "resolve_device", lambda name: "cpu" if name == "cpu" else "cuda:0"
    )
    job = dataclasses.replace(_jobs()[0], params=SimpleNamespace(**values))
    assert devices.on_any_gpu(job) is any_gpu


def test_without_gpus_nothing_is_put_anywhere():
    assert devices.gpu_places() == [] or all(
        place[devices.VISIBLE].startswith("GPU-") for place in devices.gpu_places()
    )


def test_a_gpus_lock_is_the_same_under_whichever_number_it_has(monkeypatch):
    monkeypatch.setattr(
        machine, "gpu_uuid", lambda device: {"cuda:0": "GPU-a", "cuda:1": "GPU-b"}[device]
    )
    assert lock.lock_path("cuda:1").name == "nanolib-GPU-b.lock" != lock.lock_path("cuda:0").name
    # the other is hidden from this process
    monkeypatch.setattr(machine, "gpu_uuid", lambda device: {"cuda:0": "GPU-b"}[device])
    assert lock.lock_path("cuda:0").name == "nanolib-GPU-b.lock"
    assert lock.lock_path("cpu").name == "nanolib-cpu.lock"
