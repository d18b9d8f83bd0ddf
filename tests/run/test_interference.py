"""Interference during a run flags its rows, and adds lines to the run and the terminal."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from nanolib.measurement import Flag, Measurement, Provenance, exact
from nanolib.meters.interference import CpuLoad
from nanolib.run import provenance, sweep
from nanolib.run.provenance import flag_interference
from nanolib.run.timeout import Outcome
from tests.run import sample_experiment as sample

BUSY, QUIET = CpuLoad(others=0.4, stolen=0.0), CpuLoad(others=0.09, stolen=0.0)
MET = "2 of 3 cases other processes, or a hypervisor, took up to 40% of the CPUs"


@pytest.fixture
def loads(monkeypatch):
    """Give the sweep a load per case, on a machine that is quiet before the run."""

    def use(*given, before=()):
        left = iter(given)

        @contextmanager
        def watched():
            yield next(left)

        monkeypatch.setattr(sweep, "watch_cpus", watched)
        monkeypatch.setattr(provenance, "find_interference", lambda device: list(before))

    return use


def _measure(store, *behaviors, **rest):
    params = sample.Params(behaviors=list(behaviors), **rest)
    run = sweep.measure(sample, params, store=store, progress=False)
    run.finish()
    rows = run.measurements()
    names = rows["factor.behavior"] + " " + rows["metric"]
    return dict(zip(names, map(set, rows["flags"]), strict=True)), store.runs().interference[0]


def test_what_was_measured_beside_others_is_flagged_and_the_run_keeps_that_it_was(
    store, loads, capsys
):
    loads(CpuLoad(others=0.2, stolen=0.0), QUIET, BUSY)
    flags, found = _measure(store, "ok-1", "ok-2", "ok-3")
    assert flags == {
        f"ok-{number} {metric}": {Flag.BUSY_MACHINE} if number != 2 and metric != "flops" else set()
        for number in (1, 2, 3)
        for metric in ("case_duration", "flops", "latency")
    }
    assert found == [f"during {MET}"]
    assert f"not a quiet machine: during {MET}" in capsys.readouterr().err


def test_ones_own_quota_is_named_and_nobody_else(store, loads):
    loads(CpuLoad(others=0.0, stolen=0.0, throttled=0.5, quota=0.5))
    flags, found = _measure(store, "ok")
    assert flags["ok latency"] == {Flag.THROTTLED}
    assert found == ["during 1 of 1 cases a CPU quota of 0.5 cores slowed this process down"]


def test_a_run_that_goes_on_keeps_what_it_met_before(store, loads):
    loads(BUSY, before=["others use 60%"])
    _, first = _measure(store, "ok")
    loads(before=["others use 30%"])
    _, then = _measure(store, "ok", resume=True)
    assert then == [*first, "others use 30%"] and len(first) == 2


def _flagged(load, *rows):
    outcome = Outcome(list(rows))
    flag_interference(outcome, load)
    return outcome.rows


_LATENCY = Measurement("latency", 1.0, scope="forward")
_WATCHED = {"details": {"others_share": 0.01}}


@pytest.mark.parametrize(
    ("row", "is_flagged"),
    [
        (_LATENCY, True),
        (Measurement("energy", 1.0), True),
        (Measurement("overhead", 1.0), True),
        (replace(_LATENCY, details={"others_share": None}), True),
        (replace(_LATENCY, **_WATCHED), False),
        (Measurement("latency", status="unsupported"), False),
        (replace(_LATENCY, provenance=Provenance.MODELLED), False),
        (Measurement("energy", 1.0, provenance=Provenance.REPLAYED), False),
        (exact("flops", 1.0), False),
    ],
)
def test_what_others_can_change_is_flagged_unless_it_watched_its_own_time(row, is_flagged):
    (found,) = _flagged(BUSY, row)
    assert found.flags == ((Flag.BUSY_MACHINE,) if is_flagged else ())
    assert _flagged(QUIET, row) == [row]


def test_what_is_computed_from_a_timing_has_its_flags():
    busy = replace(_LATENCY, flags=(Flag.BUSY_MACHINE,), details={"others_share": 0.5})
    rate = Measurement("flops_per_second", 1.0, scope="forward")
    assert _flagged(QUIET, busy, rate)[1].flags == (Flag.BUSY_MACHINE,)
    assert _flagged(BUSY, replace(busy, flags=()), rate)[1].flags == ()
