"""The resources and results of a Ray task; tests/benchmarks/ray_nodes.py kills a node."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import BadInput, RunStatus
from nanolib.run import on_ray
from nanolib.run.jobs import plan
from nanolib.run.notebooks import Command, NotebookResult
from nanolib.run.provenance import source_digest
from nanolib.store import Store

SMALL = {"num_heads": 2, "attention_types": ["dense"], "quality_patterns": []}
NODES = [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}, {"memory": 1.0}]


def _job(**values):
    (job,) = plan(ALL, ["attention"], {**SMALL, "seq_lens": [16], **values}, {})
    return job


def _job_with(params):
    return dataclasses.replace(_job(), params=SimpleNamespace(**params))


@pytest.mark.parametrize(
    ("values", "nodes", "wanted"),
    [
        ({"device": "cpu"}, NODES, {"num_cpus": 4.0}),
        ({"device": "auto"}, NODES, {"num_gpus": 1, "num_cpus": 1}),
        ({"device": "auto"}, NODES[:1], {"num_cpus": 4.0}),
        ({"device": "auto", "world_sizes": [1, 2]}, NODES, {"num_gpus": 2, "num_cpus": 1}),
        ({"device": "cpu", "world_sizes": [1, 2]}, NODES, {"num_cpus": 4.0}),
    ],
)
def test_a_task_takes_a_gpu_for_each_rank_or_a_whole_nodes_cpus(values, nodes, wanted):
    assert on_ray.resources(_job_with(values), nodes) == wanted


@pytest.mark.parametrize(
    ("values", "nodes", "message"),
    [
        ({"device": "cuda"}, NODES[:1], r"needs 1 GPU\(s\) on one node, and the most .* is 0"),
        (
            {"device": "auto", "world_sizes": [4]},
            NODES,
            r"needs 4 GPU\(s\) on one node, and the most that one has is 2",
        ),
        ({"device": "cpu"}, NODES[2:], "needs a node with CPUs, and the cluster has none"),
    ],
)
def test_a_job_that_no_node_can_run_is_bad_input(values, nodes, message):
    with pytest.raises(BadInput, match=message):
        on_ray.resources(_job_with(values), nodes)


def test_a_node_with_other_sources_refuses():
    job = _job()
    with pytest.raises(BadInput, match="another nanolib"):
        on_ray._measure(job.name, job.load, dict(job.values), "token", "0123")


@pytest.mark.notebook
def test_a_task_brings_back_its_database_notebook_and_log(tmp_path):
    job = _job(budget_s=0.02, backward=False)
    answer = on_ray._measure(job.name, job.load, dict(job.values), "token", source_digest())
    ray = SimpleNamespace(
        get=lambda _: answer, exceptions=SimpleNamespace(RayError=ZeroDivisionError)
    )
    end, command = NotebookResult("attention"), Command(tmp_path)
    on_ray._bring_back(ray, None, end, command)
    with Store(tmp_path / "results.sqlite") as store:
        assert end.status == RunStatus.DONE and end.run_id in set(store.runs().run_id)
        assert len(store.measurements([end.run_id])) > 5
    notebook = json.loads((tmp_path / "attention.ipynb").read_text())
    assert notebook["metadata"]["papermill"]["exception"] is None
    assert (command.logs / "attention.log").is_file()
