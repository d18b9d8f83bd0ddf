"""Runs are merged once and as a whole, invalid files are refused, and named runs are deleted."""

import contextlib
import sqlite3

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.measurement import BadInput, Measurement, Status
from nanolib.store import Store
from nanolib.store.schema import TRACE_TABLES
from tests.features import results
from tests.store.rows import make_run

TABLES = ("machines", "runs", "measurements", "traces", *TRACE_TABLES)


@pytest.fixture
def theirs(tmp_path):
    """Make a database of one run with a trace."""
    path = tmp_path / "theirs.sqlite"
    with Store(path) as store:
        store.add(make_run("a"))
        store.add_power_samples([{"t_s": 0.1, "watts": 5.0}], run_id="a", case_id="case1")
    return path


def _contents(path):
    """Return all rows of a database, without the IDs of measurements."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        found = {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES}
    found["measurements"] = [row[1:] for row in found["measurements"]]
    return {table: sorted(map(repr, rows)) for table, rows in found.items()}


def test_a_database_is_merged_once_with_all_it_holds_and_stays_as_it_is(theirs, store, tmp_path):
    before = theirs.read_bytes()
    store.add(make_run("b"))
    assert [store.merge(theirs) for _ in range(2)] == [1, 0]
    assert list(store.runs().run_id) == ["b", "a"]
    assert list(store.trace("power_samples").watts) == [5.0]
    assert theirs.read_bytes() == before and list(tmp_path.glob("theirs*")) == [theirs]


def test_real_results_are_merged_to_the_last_figure(tmp_path):
    stored = results(tmp_path)
    with Store(tmp_path / "new.sqlite") as store:
        assert store.merge(stored) == 6
    assert _contents(tmp_path / "new.sqlite") == _contents(stored)


def _copy(path, status, finished):
    rows = {f"c{n}": ({"n": n}, [Measurement("case_duration", 1.0, n=1)]) for n in range(finished)}
    if status != "done":
        rows["open"] = {"n": 9}, [Measurement("case_duration", status=Status.STARTED)]
    with Store(path) as store:
        store.add(make_run("first"))
        store.add(make_run("both", rows=rows))
        store.update_run("both", status=status)
        store.add(make_run("last"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("interrupted", 3), ("done", 3)),
        (("failed", 3), ("done", 2)),  # a run that is done is complete
        (("interrupted", 1), ("failed", 2)),
        (("running", 0), ("interrupted", 1)),
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
            assert len(store.finished_cases("both")) == other[1]
    worse, better = (_contents(tmp_path / name) for name in ("worse", "better"))
    assert worse["measurements"] == better["measurements"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("DROP TABLE tokens", "no such table: other.tokens"),
        ("UPDATE runs SET machine_id = 'm2'", "FOREIGN KEY constraint failed"),
        ("UPDATE measurements SET status = 'fine'", "CHECK constraint failed"),
    ],
)
def test_what_nanolib_would_not_write_is_refused_in_one_line_and_nothing_comes_in(
    theirs, store, change, told
):
    with contextlib.closing(sqlite3.connect(theirs)) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        db.execute(change)
        db.commit()
    before = _contents(store.path)
    ended = CliRunner().invoke(main, ["merge", str(theirs), "--output", str(store.path.parent)])
    assert ended.exit_code == 2 and told in ended.output and ended.output.count("\n") == 1, (
        ended.output
    )
    assert _contents(store.path) == before


def test_a_missing_database_is_not_made_by_merging_it(store, tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        store.merge(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


@pytest.mark.parametrize(
    ("options", "left"), [("--run b", "ac"), ("--run b --run c", "a"), ("--run b --keep 1", "c")]
)
def test_named_runs_are_deleted_with_their_rows(tmp_path, store, options, left):
    def nano(*more):
        arguments = ["clean", *options.split(), *more, "--output", str(tmp_path)]
        return CliRunner().invoke(main, arguments).output.splitlines()

    for name in "abc":
        store.add(make_run(name * 4, name))
    kept = [name * 4 for name in left]
    *lines, last = nano("--dry-run")
    assert last == f"{3 - len(kept)} run(s) would be deleted"
    assert {line.split()[0] for line in lines[1:]} == {"aaaa", "bbbb", "cccc"} - {*kept}
    assert nano()[-1] == f"{3 - len(kept)} run(s) were deleted"
    assert list(store.runs().run_id) == kept
    assert set(store.measurements().run_id) == {*kept}
