"""Interference before a run is a line of the run, and interference during a case flags its rows."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from nanolib.measurement import Flag, Measurement, Provenance, exact
from nanolib.meters.interference import CpuLoad
from nanolib.run import prepare, sweep
from nanolib.run.outcome import Outcome

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
        monkeypatch.setattr(prepare, "find_interference", lambda device: list(before))
        run = measure("ok 0", "ok 1", resume=resume)
        run.finish()
        flags = run.measurements().groupby("factor.behavior")["flags"].agg(list)
        return flags.to_dict(), store.runs().interference[0]

    before = ["others use 60%"]
    flags, lines = met(BUSY, QUOTA, before=before)
    assert flags == {  # of duration, FLOPs and latency
        "ok 0": [[Flag.BUSY_MACHINE], [], [Flag.BUSY_MACHINE]],
        "ok 1": [[Flag.THROTTLED], [], [Flag.THROTTLED]],
    }
    assert lines == before
    assert met(before=["others use 30%"], resume=True)[1] == ["others use 30%"]


def _flagged(load, *rows):
    outcome = Outcome(list(rows))
    outcome.add_interference(load)
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
