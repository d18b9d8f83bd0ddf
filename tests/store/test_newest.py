"""What is newest follows the order in which the database got its runs, and no clock."""

from datetime import UTC, datetime, timedelta

import pytest

from nanolib.experiments.summary.cases import select_runs
from nanolib.measurement import Measurement, RunStatus
from nanolib.store import Store
from nanolib.store.schema import Run

MACHINE = {"machine_id": "m", "cpu": "c", "cores": 1, "ram_gib": 1, "gpus": [], "dtypes": {}}
AHEAD = (datetime.now(UTC) + timedelta(hours=20)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _add(store, run_id, started="", **rest):
    rows = {"c": ({"name": "dense"}, [Measurement("case_time", 1.0, n=1)])}
    store.add(Run("attention", MACHINE, rows=rows, run_id=run_id, **rest))
    if started:
        store.connection.execute("UPDATE runs SET started = ? WHERE run_id = ?", (started, run_id))


@pytest.fixture
def store(tmp_path):
    """Whose first run began when the clock was ahead, and whose last when it was far behind."""
    with Store(tmp_path / "results.sqlite") as opened:
        _add(opened, "z-first", AHEAD)
        _add(opened, "a-second")
        _add(opened, "m-third", "2001-01-01T00:00:00.000000Z")
        yield opened


def test_a_run_dated_in_the_future_is_not_the_latest_for_ever(store):
    assert store.resolve("latest") == ["m-third"] and store.resolve("latest~1") == ["a-second"]
    assert store.newest_runs() == select_runs(store, ["newest"]) == ["m-third"]
    assert list(store.runs().run_id) == ["z-first", "a-second", "m-third"]
    assert store.runs_before(["m-third"]) == ["a-second"] and store.runs_before(["z-first"]) == []
    assert list(store.measurements(newest=1).run_id) == ["m-third"]
    assert set(store.figures("case_time", ["m"], last=1).run_id) == {"m-third"}
    assert store.cleanup_old_runs(None, max_runs=1) == ["z-first", "a-second"]


def test_runs_that_are_merged_keep_their_order_and_come_after_what_is_here(store, tmp_path):
    with Store(tmp_path / "other.sqlite") as other:
        _add(other, "y-theirs", AHEAD)
        _add(other, "b-theirs")
        other.merge(store.path)
        assert list(other.runs().run_id) == ["y-theirs", "b-theirs", "z-first", "a-second", "m-third"]


def test_a_run_that_is_completed_by_a_merge_keeps_its_place(store, tmp_path):
    with Store(tmp_path / "other.sqlite") as other:
        other.merge(store.path)
    store.update_run("a-second", status=RunStatus.INTERRUPTED)
    assert store.merge(tmp_path / "other.sqlite") == 1
    assert list(store.runs().run_id) == ["z-first", "a-second", "m-third"]
    assert store.runs().status.iloc[1] == RunStatus.DONE
