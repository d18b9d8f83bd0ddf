"""What is merged, what is not, what cannot be decoded, and what is deleted."""

import contextlib
import sqlite3

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.experiments.summary.cases import Params, load
from nanolib.measurement import Measurement, exact
from nanolib.report.page import build
from nanolib.store import Run, Store
from nanolib.store.schema import TRACE_TABLES
from tests.shown import SECTIONS

TABLES = ("machines", "runs", "measurements", "traces", *TRACE_TABLES)
MACHINE = {
    "machine_id": "m1",
    "cpu": "c",
    "cores": 2,
    "ram_gib": 8,
    "gpus": [{"name": "g"}],
    "dtypes": {"float32": "avx"},
}


@pytest.fixture
def theirs(tmp_path):
    """One run with a trace, to be made worse."""
    path = tmp_path / "theirs.sqlite"
    with Store(path) as store:
        rows = {
            "case": ({"name": "dense", "seq_len": 8}, [Measurement("latency", 2.0, 1.0, 3.0, 0.95, 3, (1.0, 2.0, 3.0))])
        }
        store.add(Run("attention", MACHINE, rows=rows, run_id="12345678-0000-4000-8000-000000000000", device="cpu"))
        store.add_power_samples(
            [{"t_s": 0.1, "watts": 5.0}], run_id="12345678-0000-4000-8000-000000000000", case_id="case"
        )
    return path


@pytest.fixture
def ours(tmp_path):
    with Store(tmp_path / "out" / "results.sqlite") as store:
        store.add(Run("attention", MACHINE, rows={"case": ({"name": "sparse"}, [exact("flops", 1)])}, run_id="ours"))
    return tmp_path / "out" / "results.sqlite"


def _execute(path, *statements):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


def _contents(path):
    """All rows of a database."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        return [(table, sorted(map(repr, db.execute(f"SELECT * FROM {table}")))) for table in TABLES]


def _nano(*arguments, folder):
    return CliRunner().invoke(main, [*arguments, "--output", str(folder)])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("DROP TABLE tokens", "no such table: other.tokens"),
        ("ALTER TABLE measurements DROP COLUMN predicted", "no such column: predicted"),
        ("UPDATE runs SET machine_id = 'm2'", "FOREIGN KEY constraint failed"),
    ],
)
def test_a_database_whose_tables_are_not_ours_is_refused_in_one_line_and_nothing_comes_in(theirs, ours, change, told):
    _execute(theirs, change)
    before = _contents(ours)
    ended = _nano("merge", str(theirs), folder=ours.parent)
    assert ended.exit_code == 2 and told in ended.output, ended.output
    assert len(ended.output.splitlines()) == 1 and str(theirs) in ended.output
    assert _contents(ours) == before


def test_a_database_is_merged_once_with_all_it_holds(theirs, ours):
    with Store(ours) as store:
        assert (store.merge(theirs), store.merge(theirs)) == (1, 0)
        assert sorted(store.measurements().run_id.unique()) == ["12345678-0000-4000-8000-000000000000", "ours"]
        assert list(store.trace("power_samples").watts) == [5.0]


def test_a_database_that_is_merged_stays_as_it_is_to_the_byte(theirs, ours):
    before = {file.name: file.read_bytes() for file in theirs.parent.glob("theirs*")}
    with Store(ours) as store:
        assert store.merge(theirs) == 1
    assert {file.name: file.read_bytes() for file in theirs.parent.glob("theirs*")} == before


def test_a_run_that_cannot_be_decoded_is_listed_as_broken_and_can_be_removed(ours):
    with Store(ours) as store:
        store.add(Run("model", MACHINE, rows={"c": ({}, [exact("flops", 1)])}, run_id="bad"))
    _execute(ours, "UPDATE runs SET params = 'x' WHERE run_id = 'bad'")
    assert _nano("runs", folder=ours.parent).exit_code == 0
    with Store(ours) as store:
        (broken,) = store.runs().query("experiment == 'model'").to_dict("records")
    assert broken["status"] == "broken"
    assert broken["message"] == "this run is broken: its params cannot be decoded; nano clean --run bad removes the run"
    assert _nano("clean", "--run", "bad", folder=ours.parent).output.endswith("\n1 run(s) were deleted\n")
    with Store(ours) as store:
        assert list(store.runs().run_id) == ["ours"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("factors", "'x'"),
        ("details", "'[]'"),
        ("flags", "''"),
        ("samples", "x'00'"),
        ("factors", "CAST(x'ff' AS TEXT)"),
    ],
)
def test_a_row_that_cannot_be_decoded_is_shown_as_a_case_that_failed_and_ends_no_command(theirs, column, value):
    with Store(theirs) as store:
        store.add(Run("attention", MACHINE, rows={"other": ({"name": "sparse"}, [exact("flops", 1)])}, run_id="good"))
    _execute(theirs, f"UPDATE measurements SET {column} = {value} WHERE run_id != 'good'")
    with Store(theirs) as store:
        ids = store.resolve("all")
        row, _ = store.measurements(ids, samples=True).to_dict("records")
        assert (row["metric"], row["status"], row["run_id"]) == ("case_time", "error", ids[0])
        told = f"row 1 is broken: its {column} cannot be decoded; nano clean --run 12345678 removes the run"
        assert row["message"] == told
        page = build(store, ids[:1], theirs.parent / "report", SECTIONS, pictures=False).read_text(encoding="utf-8")
        assert len(store.figures("latency", ["m1"])) == (column in ("details", "flags", "samples"))
    assert "row 1 is broken" in page
    assert len(load(Params(runs=["all"], database=str(theirs)))[2]) == 2
    theirs.rename(theirs.parent / "results.sqlite")
    for name in ("x.sqlite", "x.json", "x.csv", "x.md"):
        ended = _nano("export", str(theirs.parent / name), "--run", "all", folder=theirs.parent)
        assert ended.exit_code == 0, ended.output
    assert _nano("history", folder=theirs.parent).exit_code == 0


@pytest.mark.parametrize(
    ("options", "left"),
    [(["--run", "b"], "ac"), (["--run", "b", "--run", "c"], "a"), (["--run", "b", "--keep", "1"], "")],
)
def test_named_runs_are_deleted_with_all_that_hangs_off_them(tmp_path, options, left):
    with Store(tmp_path / "results.sqlite") as store:
        for name in "abc":
            store.add(Run("attention", MACHINE, rows={"c": ({}, [exact("flops", 1)])}, run_id=name * 4, label=name))
            store.add_power_samples([{"t_s": 0.1, "watts": 5.0}], run_id=name * 4)
    count = 3 - len(left or "c")
    dry = _nano("clean", *options, "--dry-run", folder=tmp_path)
    lines = dry.output.splitlines()
    assert lines.pop() == f"{count} run(s) would be deleted"
    assert {line.split()[0] for line in lines[1:]} == {name * 4 for name in "abc" if name not in (left or "c")}
    assert _nano("clean", *options, folder=tmp_path).output.endswith(f"\n{count} run(s) were deleted\n")
    with Store(tmp_path / "results.sqlite") as store:
        kept = [name * 4 for name in left or "c"]
        assert list(store.runs().run_id) == kept and set(store.measurements().run_id) == set(kept)
        assert [
            set(store.trace("power_samples").run_id),
            len(store.connection.execute("SELECT * FROM traces").fetchall()),
        ] == [set(kept), len(kept)]
        assert store.connection.execute("SELECT count(*) FROM power_samples").fetchone() == (len(kept),)
        assert store.connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert store.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_name_that_is_one_runs_label_and_anothers_id_deletes_neither(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        for run_id, label in (("abcd1234", ""), ("11111111", "abcd1234")):
            store.add(Run("attention", MACHINE, rows={"c": ({}, [exact("flops", 1)])}, run_id=run_id, label=label))
    ended = _nano("clean", "--run", "abcd1234", folder=tmp_path)
    assert ended.exit_code == 2 and "what run 11111111 is called, and how the id of run abcd1234 begins" in ended.output
    assert _nano("clean", "--run", "1111", folder=tmp_path).exit_code == 0


def test_the_pages_of_several_runs_name_them(tmp_path, ours):
    with Store(ours) as store:
        store.add(Run("attention", MACHINE, rows={"case": ({"name": "sparse"}, [exact("flops", 2)])}, run_id="later"))
    assert _nano("export", str(tmp_path / "x.md"), "--run", "all", folder=ours.parent).exit_code == 0
    text = (tmp_path / "x.md").read_text()
    assert "| run_id" in text and "ours" in text and "later" in text and "machine_id" not in text


def test_a_run_in_flight_is_not_deleted_by_name(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        store.add(Run("attention", MACHINE, run_id="flying"))
    ended = _nano("clean", "--run", "flying", folder=tmp_path)
    assert ended.exit_code == 2 and ended.output == "nano: run: flying is in flight; stop it first\n"


def test_a_kill_after_the_runs_are_gone_leaves_rows_that_nobody_sees_and_the_next_call_frees(theirs, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with Store(theirs) as store:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("nanolib.store.deleting._free", killed)
            store.cleanup_old_runs(None, max_runs=0)
        assert store.runs().empty and store.measurements().empty and store.trace("power_samples").empty
        store.cleanup_old_runs(None)
        assert _contents(theirs)[3:] == [(table, []) for table, _ in _contents(theirs)[3:]]


def test_where_most_goes_what_stays_is_as_it_was(theirs):
    with Store(theirs) as store:
        store.add(Run("attention", MACHINE, run_id="kept", rows={"c": ({}, [exact("flops", 1)])}))
        store.add_power_samples([{"t_s": 0.2, "watts": 7.0}], run_id="kept")
        store.add_power_samples(
            [{"t_s": at, "watts": 5.0} for at in range(50)],
            run_id="12345678-0000-4000-8000-000000000000",
            case_id="more",
        )
        store.commit_transaction()
        before = store.trace("power_samples", ["kept"])
        assert store.cleanup_old_runs(None, run_ids=["12345678-0000-4000-8000-000000000000"]) == [
            "12345678-0000-4000-8000-000000000000"
        ]
        assert store.trace("power_samples").equals(before) and len(before) == 1
