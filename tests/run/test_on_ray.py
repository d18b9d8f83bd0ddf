"""Jobs in parts, and what a Ray task is given; tests/benchmarks/ray_nodes.py runs a cluster and kills a node."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from nanolib.experiments import ALL
from nanolib.experiments.attention import cases as attention
from nanolib.measurement import BadInput, RunStatus
from nanolib.run import sweep
from nanolib.run.ceilings import CeilingCase
from nanolib.run.suite import on_ray
from nanolib.run.suite.jobs import in_parts, plan
from nanolib.run.suite.runner import Ended
from nanolib.store import Store

SMALL = {
    "seq_lens": [16, 32, 48, 64],
    "num_heads": 2,
    "attention_types": ["dense"],
    "quality_patterns": [],
}


def _jobs(parts=1, name="attention", **values):
    return in_parts(
        plan(ALL, [name], {**(SMALL if name == "attention" else {}), **values}, {}), parts
    )


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 9])
def test_parts_share_the_cases_and_each_has_the_ceilings(parts):
    whole = _jobs()[0].cases()
    jobs = _jobs(parts)
    own = [[case for case in job.cases() if not isinstance(case, CeilingCase)] for job in jobs]
    assert len(jobs) == min(parts, 4) and all(own)
    assert sorted(str(case) for part in own for case in part) == sorted(
        str(case) for case in whole if not isinstance(case, CeilingCase)
    )
    ceilings = [case for case in whole if isinstance(case, CeilingCase)]
    assert all(
        [case for case in job.cases() if isinstance(case, CeilingCase)] == ceilings for job in jobs
    )
    assert len({job.title for job in jobs}) == len(jobs)


@pytest.mark.slow
def test_a_part_measures_its_cases_and_is_a_run_of_its_own(tmp_path, monkeypatch):
    params = attention.Params(**SMALL, device="cpu", budget_s=0.02, backward=False)
    with Store(tmp_path / "results.sqlite") as store:
        prints = []
        for part in ("1/2", "2/2"):
            monkeypatch.setenv(sweep.PART_VARIABLE, part)
            run = sweep.measure(attention, params, store=store, progress=False)
            rows = run.measurements()
            prints.append(store.runs("run_id = ?", (run.run_id,)).fingerprint.iloc[0])
            lengths = {16: "1/2", 32: "2/2", 48: "1/2", 64: "2/2"}
            assert set(rows["factor.seq_len"].dropna()) == {
                n for n, of in lengths.items() if of == part
            }
            assert (rows.metric == "ceiling_flops").any()
    assert len(set(prints)) == 2  # one does not continue the other


def test_a_summary_is_in_no_part():
    assert [job.title for job in _jobs(3, "summary")] == ["summary"]


NODES = [{"CPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}, {"memory": 1.0}]


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
    (job,) = _jobs()
    job = dataclasses.replace(job, params=SimpleNamespace(**values))
    assert on_ray.resources(job, nodes) == wanted


@pytest.mark.parametrize(
    ("values", "nodes", "said"),
    [
        (
            {"device": "cuda"},
            NODES[:1],
            r"attention needs 1 GPU\(s\) on one node, and the most that one has is 0",
        ),
        (
            {"device": "auto", "world_sizes": [4]},
            NODES,
            r"needs 4 GPU\(s\) on one node, and the most that one has is 2",
        ),
        ({"device": "cpu"}, NODES[2:], "needs a node with CPUs, and the cluster has none"),
    ],
)
def test_what_no_node_has_is_told(values, nodes, said):
    (job,) = _jobs()
    with pytest.raises(BadInput, match=said):
        on_ray.resources(dataclasses.replace(job, params=SimpleNamespace(**values)), nodes)


def test_a_node_with_other_sources_refuses():
    (job,) = _jobs()
    with pytest.raises(BadInput, match="another nanolib"):
        on_ray._measure(job.name, job.load, dict(job.values), "", "token", "0123")


@pytest.mark.notebook
def test_a_task_brings_back_its_database_notebook_and_log(tmp_path):
    (job,) = _jobs(seq_lens=[16], budget_s=0.02, backward=False)
    answer = on_ray._measure(
        job.name, job.load, dict(job.values), "", "token", sweep.source_digest()
    )
    ray = SimpleNamespace(get=lambda _: answer)
    end = Ended("attention")
    with Store(tmp_path / "results.sqlite") as store, (tmp_path / "log").open("w+") as log:
        on_ray._bring_back(ray, None, job, end, tmp_path, store, log)
        assert end.status == RunStatus.DONE and end.run_id in set(store.runs().run_id)
        assert len(store.measurements([end.run_id])) > 5
    assert (
        json.loads((tmp_path / "attention.ipynb").read_text())["metadata"]["papermill"]["exception"]
        is None
    )
