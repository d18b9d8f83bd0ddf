"""A Ray task requests resources and returns its files."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import BadInput, RunStatus
from nanolib.params import plan_jobs
from nanolib.paths import DATABASE
from nanolib.run import notebooks, on_ray
from nanolib.run.notebooks import Command, NotebookResult
from nanolib.store import Store
from tests.store.rows import make_run

SMALL = {"num_heads": 2, "attention_types": ["dense"], "quality_attentions": [], "seq_lens": [16]}
NODES = [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}, {"memory": 1.0}]


@pytest.fixture
def job():
    return plan_jobs(ALL, ["attention"], SMALL, {})[0]


@pytest.mark.parametrize(
    ("values", "nodes", "wanted"),
    [
        ({"device": "cpu"}, NODES, {"num_cpus": 4.0}),
        ({"device": "auto"}, NODES, {"num_gpus": 1, "num_cpus": 1}),
        ({"device": "auto", "world_sizes": [1, 2]}, NODES, {"num_gpus": 2, "num_cpus": 1}),
        ({"device": "auto", "world_sizes": [4]}, NODES, "the largest node has 2"),
    ],
)
def test_a_task_takes_a_gpu_for_each_rank_or_a_whole_nodes_cpus(job, values, nodes, wanted):
    job = dataclasses.replace(job, params=SimpleNamespace(NAME="attention", suite="", **values))
    if isinstance(wanted, dict):
        assert on_ray.resources(job, nodes) == wanted
    else:
        with pytest.raises(BadInput, match=re.escape(wanted)):
            on_ray.resources(job, nodes)


def _run_papermill(job, command, watch):
    """Leave what papermill leaves: a run that is done, an executed notebook, and a log."""
    with Store(command.output / DATABASE) as store:
        store.add(make_run("a run", launch=command.launch(job.title)))
    (command.output / f"{job.title}.ipynb").write_text("executed")
    (command.logs / f"{job.title}.log").write_text("log")
    watch()
    return ""


def test_a_task_brings_back_its_database_notebook_and_log(tmp_path, store, monkeypatch, job):
    monkeypatch.setattr(notebooks, "_run_papermill", _run_papermill)
    answer = on_ray._measure(job, "token")
    ray = SimpleNamespace(
        get=lambda _: answer, exceptions=SimpleNamespace(RayError=ZeroDivisionError)
    )
    end, command = NotebookResult("attention"), Command(tmp_path)
    on_ray._bring_back(ray, None, end, command)
    assert end.status == RunStatus.DONE and list(store.runs().run_id) == [end.run_id] == ["a run"]
    assert len(store.measurements()) == 2
    assert (tmp_path / "attention.ipynb").read_text() == "executed"
    assert (command.logs / "attention.log").read_text() == "log"


def test_a_task_that_failed_gives_the_message_of_its_cause(tmp_path):
    class TaskError(Exception):
        cause = OSError("no space left")

    def get(_):
        raise TaskError("a traceback of many lines")

    ray = SimpleNamespace(get=get, exceptions=SimpleNamespace(RayError=TaskError))
    end = NotebookResult("attention")
    on_ray._bring_back(ray, None, end, Command(tmp_path))
    assert (end.status, end.message) == (RunStatus.FAILED, "no space left")
