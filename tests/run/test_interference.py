"""Interference before a run is a line of the run, and interference during a case flags its rows."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from nanolib.measurement import Flag, Measurement, Provenance, exact
from nanolib.meters.interference import CpuLoad
from nanolib.run import provenance, sweep
from nanolib.run.provenance import flag_interference
from nanolib.run.timeout import Outcome

BUSY, QUIET = CpuLoad(others=0.4, stolen=0.0), CpuLoad(others=0.09, stolen=0.0)
QUOTA = CpuLoad(0.0, 0.0, "a CPU quota of 1 cores")


def test_rows_that_met_others_or_the_own_quota_are_flagged_and_the_run_has_what_it_began_with(
    measure, store, monkeypatch
):
    def met(*loads, before, resume=False):
        """Measure a case under each load, and return the flags of its rows and the run's lines."""
        left = iter(loads)

        @contextmanager
        def watched():
            yield next(left)

        monkeypatch.setattr(sweep, "watch_cpus", watched)
        monkeypatch.setattr(provenance, "find_interference", lambda device: list(before))
        run = measure(*(f"ok {number}" for number in range(4)), resume=resume)
        run.finish()
        flags = run.measurements().groupby("factor.behavior")["flags"].agg(list)
        return flags.to_dict(), store.runs().interference[0]

    before = ["others use 60%"]
    flags, lines = met(CpuLoad(others=0.2, stolen=0.0), QUIET, BUSY, QUOTA, before=before)
    met_others = [[Flag.BUSY_MACHINE], [], [Flag.BUSY_MACHINE]]  # duration, FLOPs, latency
    met_quota = [[Flag.THROTTLED], [], [Flag.THROTTLED]]
    assert flags == {
        "ok 0": met_others,
        "ok 1": [[], [], []],
        "ok 2": met_others,
        "ok 3": met_quota,
    }
    assert lines == before
    assert met(before=["others use 30%"], resume=True)[1] == ["others use 30%"]


def _flagged(load, *rows):
    outcome = Outcome(list(rows))
    flag_interference(outcome, load)
    return outcome.rows


_LATENCY = Measurement("latency", 1.0, scope="forward")


@pytest.mark.parametrize(
    ("row", "is_flagged"),
    [
        (_LATENCY, True),
        (replace(_LATENCY, details={"others_share": 0.01}), False),
        (replace(_LATENCY, details={"clean_rounds": 6}), False),
        (replace(_LATENCY, details={"clean_rounds": None}), True),
        (replace(_LATENCY, provenance=Provenance.MODELLED), True),
        (replace(_LATENCY, provenance=Provenance.REPLAYED), False),
        (exact("flops", 1.0), False),
    ],
)
def test_what_others_can_change_is_flagged_unless_it_watched_its_own_time(row, is_flagged):
    (found,) = _flagged(BUSY, row)
    assert found.flags == ((Flag.BUSY_MACHINE,) if is_flagged else ())
    assert _flagged(QUIET, row) == [row]
