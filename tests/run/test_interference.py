"""What others do while a run measures: its rows, its line in the database, and what the terminal shows of it."""

from contextlib import contextmanager

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import Flag, Measurement, Provenance, exact
from nanolib.meters.cpu_load import CpuLoad
from nanolib.run import notebooks, provenance, sweep
from nanolib.run.interference import flagged
from nanolib.run.jobs import plan
from nanolib.store import Store
from tests.run import sample_experiment as sample

BUSY, HELD_BACK = (
    CpuLoad(others=0.4, stolen=0.0),
    CpuLoad(others=0.0, stolen=0.0, held_back=0.5, quota=0.5),
)
QUIET = CpuLoad(others=0.09, stolen=0.0)
MET = "2 of 3 cases other processes, or a hypervisor, took up to 40% of the CPUs"


@pytest.fixture
def loads(monkeypatch):
    """Give the sweep these loads, one per case, on a machine that is quiet when it begins."""

    def use(*given, before=()):
        left = iter(given)

        @contextmanager
        def watched():
            yield next(left)

        monkeypatch.setattr(sweep, "watched_cpus", watched)
        monkeypatch.setattr(provenance, "disturbances", lambda device: list(before))

    return use


def _measure(path, *behaviours, **rest):
    with Store(path / "results.sqlite") as store:
        params = sample.Params(behaviours=list(behaviours), **rest)
        run = sweep.measure(sample, params, store=store, progress=False)
        run.finish()
        rows, runs = run.measurements(), store.runs()
    flags = {
        name: set(flags)
        for name, flags in zip(
            rows["factor.behaviour"] + " " + rows["metric"], rows["flags"], strict=True
        )
    }
    return flags, runs.disturbances.to_list()


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_what_was_measured_beside_others_is_flagged_and_the_run_keeps_that_it_was(
    tmp_path, loads, capsys, isolation
):
    loads(CpuLoad(others=0.2, stolen=0.0), QUIET, BUSY)
    flags, (found,) = _measure(tmp_path, "ok-1", "ok-2", "ok-3", isolation=isolation)
    assert flags == {
        f"ok-{number} {metric}": {Flag.BUSY_MACHINE} if number != 2 and metric != "flops" else set()
        for number in (1, 2, 3)
        for metric in ("case_time", "flops", "latency")
    }
    assert found == [f"during {MET}"]
    assert f"not a quiet machine: during {MET}" in capsys.readouterr().err


def test_ones_own_quota_is_named_and_nobody_else(tmp_path, loads):
    loads(HELD_BACK)
    flags, (found,) = _measure(tmp_path, "ok")
    assert flags["ok latency"] == {Flag.THROTTLED}
    assert found == ["during 1 of 1 cases a CPU quota of 0.5 cores held this process back"]


def test_a_run_that_goes_on_keeps_what_it_met_before(tmp_path, loads):
    loads(BUSY, before=["others use 60%"])
    _, (first,) = _measure(tmp_path, "ok")
    loads(before=["others use 30%"])
    _, (then,) = _measure(tmp_path, "ok", resume=True)
    assert then == [*first, "others use 30%"] and len(first) == 2


def test_a_row_that_watched_its_own_span_keeps_what_it_saw_and_so_does_what_is_made_of_it():
    quiet = Measurement("latency", 1.0, scope="forward", details={"others_share": 0.01})
    busy = Measurement(
        "latency", 1.0, scope="backward", flags=(Flag.BUSY_MACHINE,), details={"others_share": 0.5}
    )
    unknown = Measurement("latency", 1.0, scope="mask", details={"others_share": None})
    made = [
        Measurement("flops_per_second", 1.0, scope=scope)
        for scope in ("forward", "backward", "compile")
    ]
    rows = flagged([quiet, busy, unknown, *made], BUSY)
    told = (Flag.BUSY_MACHINE,)
    assert [row.flags for row in rows] == [(), told, told, (), told, told]
    assert [row.flags for row in flagged([quiet, busy, unknown, *made], QUIET)] == [
        (),
        told,
        (),
        (),
        told,
        (),
    ]


def test_what_others_cannot_change_is_not_flagged():
    rows = [
        exact("flops", 1.0),
        exact("loss", 1.0),
        Measurement("latency", status="unsupported"),
        Measurement("latency", 1.0, provenance=Provenance.MODELLED),
        Measurement("energy", 1.0, provenance=Provenance.REPLAYED),
    ]
    assert not any(row.flags for row in flagged(rows, BUSY))
    changed = [
        Measurement(metric, 1.0)
        for metric in ("energy", "tokens_per_second", "ceiling_share", "overhead")
    ]
    assert all(row.flags for row in flagged(changed, BUSY))


# what the terminal shows


def test_the_first_line_of_a_command_says_that_the_machine_is_busy(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "disturbances", lambda device: [f"others use {device}"])
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
    assert "not a quiet machine: others use cpu" not in said  # it measures nothing
