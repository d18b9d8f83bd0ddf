"""Runs are merged once and as a whole, invalid files are refused, and named runs are deleted."""

import contextlib
import sqlite3

import pytest

from nanolib.measurement import Measurement, Status
from nanolib.store import Store
from nanolib.store.schema import TRACE_TABLES
from tests.features import results
from tests.processes import invoked
from tests.store.rows import make_run

TABLES = ("machines", "runs", "measurements", *TRACE_TABLES)


def _contents(path):
    """Return all rows of a database, without the IDs that each database numbers itself."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        found = {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}
    return {
        table: sorted(repr(row[table in TABLES[2:] :]) for row in rows)
        for table, rows in found.items()
    }


def test_real_results_are_merged_once_to_the_last_figure_and_stay_as_they_are(store, tmp_path):
    stored = results(tmp_path)
    before = stored.read_bytes()
    assert [store.merge(stored) for _ in range(2)] == [6, 0]
    assert stored.read_bytes() == before and list(tmp_path.glob("stored*")) == [stored]
    assert _contents(store.path) == _contents(stored)


def _copy(path, status, finished):
    rows = {f"c{n}": ({"n": n}, [Measurement("case_duration", 1.0, n=1)]) for n in range(finished)}
    if status != "done":
        rows["open"] = {"n": 9}, [Measurement("case_duration", status=Status.STARTED)]
    with Store(path) as store:
        store.add(make_run("first"))
        store.add(make_run("both", rows=rows))
        store.update_run("both", status=status)
        store.add(make_run("last"))
        store.connection.execute("UPDATE runs SET started = rowid")  # in both files


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("interrupted", 3), ("done", 3)),
        (("failed", 3), ("done", 2)),  # a run that is done is complete
        (("interrupted", 1), ("failed", 2)),
    ],
)
def test_a_done_run_beats_an_unfinished_one_and_the_fuller_copy_wins_whichever_is_merged(
    tmp_path, one, other
):
    for name, copy in (("worse", one), ("better", other)):
        _copy(tmp_path / name, *copy)
    with Store(tmp_path / "worse") as worse, Store(tmp_path / "better") as better:
        assert better.merge(worse.path) == 0
        assert [worse.merge(better.path) for _ in range(2)] == [1, 0]
        for store in (worse, better):
            runs = store.runs()
            assert list(runs.run_id) == ["first", "both", "last"]
            assert runs.status.iloc[1] == other[0]
    worse, better = (_contents(tmp_path / name)["measurements"] for name in ("worse", "better"))
    assert worse == better


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("DROP TABLE tokens", "no such table: other.tokens"),
        ("UPDATE runs SET machine_id = 'm2'", "FOREIGN KEY constraint failed"),
        ("UPDATE measurements SET status = 'fine'", "CHECK constraint failed"),
    ],
)
def test_what_nanolib_would_not_write_is_refused_in_one_line_and_nothing_comes_in(
    tmp_path, store, change, said
):
    theirs = tmp_path / "theirs.sqlite"
    with Store(theirs) as other:
        other.add(make_run("a"))
    with contextlib.closing(sqlite3.connect(theirs)) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute(change)
        db.commit()
    before = _contents(store.path)
    ended = invoked("merge", theirs, "--output", store.path.parent)
    assert ended.exit_code == 2 and said in ended.output, ended.output
    assert ended.output.count("\n") == 1 and _contents(store.path) == before


def test_named_runs_and_old_ones_are_deleted_with_their_rows(tmp_path, store):
    def nano(*more):
        old = "--older-than", "30d", "--output", tmp_path
        return invoked("clean", "--run", "b", *old, *more).output.splitlines()

    for name in "abc":
        store.add(make_run(name * 4, name))
    store.update_run("aaaa", started="2020-01-01T00:00:00.000000Z")
    _, *lines, last = nano("--dry-run")
    assert last == "2 run(s) would be deleted"
    assert [line.split()[0] for line in lines] == ["aaaa", "bbbb"]
    assert nano()[-1] == "2 run(s) were deleted"
    assert [*store.runs().run_id] == ["cccc"] == [*store.measurements().run_id.unique()]
