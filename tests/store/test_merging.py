import contextlib
import json
import shutil
import sqlite3
import tempfile
from pathlib import Path

import hypothesis
import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from nanolib.cli import main
from nanolib.experiments.summary.cases import Params, load
from nanolib.measurement import BadInput, Measurement, exact
from nanolib.report.page import build
from nanolib.store import Run, Store, merging
from nanolib.store.schema import APPLICATION_ID, MIGRATIONS
from tests.shown import SECTIONS
from tests.store.hostile import CHANGES, Change, commands_bear, contents, make_good, put

MACHINE = {
    "machine_id": "m1",
    "cpu": "c",
    "cores": 2,
    "ram_gib": 8,
    "gpus": [{"name": "g"}],
    "dtypes": {"float32": "avx"},
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    make_good(folder / "theirs.sqlite")
    make_good(folder / "ours.sqlite", "our-")
    return folder


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


def _nano(*arguments, folder):
    return CliRunner().invoke(main, [*arguments, "--output", str(folder)])


@pytest.mark.parametrize("reported", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_any_value_in_any_column_is_refused_or_every_command_works(good, reported):
    @settings(
        max_examples=2 if reported else 14,
        derandomize=True,
        phases=[hypothesis.Phase.generate],  # a smaller example is worth less than the minutes it takes
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @given(CHANGES)
    def holds(change):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            hostile, ours = folder / "hostile.sqlite", folder / "results.sqlite"
            shutil.copy(good / "theirs.sqlite", hostile)
            put(hostile, change)
            shutil.copy(good / "ours.sqlite", ours)
            before = contents(ours)
            try:
                with Store(ours) as store:
                    store.merge(hostile)
            except BadInput as error:
                assert len(error.lines) == 1 and len(error.lines[0].splitlines()) == 1 and contents(ours) == before
                shutil.copy(hostile, ours)  # the same in our own must be borne
            assert not commands_bear(folder, report=reported)

    holds()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            "UPDATE measurements SET estimate = 'abc'",
            "measurements 1 case latency: estimate: 'abc' is no finite number",
        ),
        ("UPDATE measurements SET low = 9e999", "low: inf is no finite number"),
        ("UPDATE measurements SET metric = 'speed'", "metric: 'speed' is unknown"),
        ("UPDATE measurements SET status = 'fine'", "status: 'fine' is unknown"),
        ("UPDATE measurements SET provenance = 'guessed'", "provenance: 'guessed' is unknown"),
        ("UPDATE measurements SET unit = 's'", "unit: 's' is not that of latency"),
        ("UPDATE measurements SET n = -1", "n: -1 is no count"),
        ("UPDATE measurements SET samples = x'00'", "is no row of float64"),
        ("UPDATE measurements SET samples = x'000000000000f87f'", "samples: not every sample is finite"),
        ("UPDATE measurements SET factors = '[]'", "factors: '[]' is no JSON object"),
        ("""UPDATE measurements SET factors = '{"seq_len": "8"}'""", "factors: seq_len: '8' is of the wrong type"),
        ("UPDATE measurements SET details = '{\"a\": NaN}'", "details: NaN is no JSON"),
        ("UPDATE measurements SET details = '{\"attempts\": []}'", "attempts: [] is no count"),
        ("UPDATE measurements SET flags = '[1]'", "flags: 1 is no text"),
        ("UPDATE measurements SET message = CAST(x'ff' AS TEXT)", "is no valid UTF-8"),
        ("UPDATE measurements SET message = CAST(zeroblob(200000) AS TEXT)", "200,000 characters, of at most"),
        ("UPDATE measurements SET case_id = 'a' || char(10)", "case_id: 'a\\n' is no name"),
        ("UPDATE measurements SET experiment = 'model'", "experiment: 'model' is not that of its run"),
        ("UPDATE runs SET started = '2999-01-01T00:00:00Z'", "started: '2999-01-01T00:00:00Z' lies in the future"),
        ("UPDATE runs SET started = 'soon'", "started: 'soon' is no moment"),
        ("UPDATE runs SET status = 'broken'", "status: 'broken' is unknown"),
        ("UPDATE runs SET params = '" + "[" * 5000 + "'", "JSON of more than 32 levels"),
        ("UPDATE runs SET machine_id = 'm2'", "machine_id: 'm2' is no machine of this database"),
        ("UPDATE machines SET gpus = '[{}]'", "machines m1: gpus: {} is no GPU with a name"),
        ("UPDATE traces SET names = '[]'", "power_samples 0: "),
        ("UPDATE power_samples SET at_us = x'61'", "power_samples 0: "),
        ("CREATE VIEW v AS SELECT 1", "view 'v' is not one of its own"),
        ("CREATE TRIGGER t AFTER INSERT ON runs BEGIN SELECT 1; END", "trigger 't' is not one of its own"),
        ("CREATE INDEX i ON runs (abs(cases))", "index 'i' is not one of its own"),
        ("CREATE VIRTUAL TABLE f USING fts5(a)", "table 'f' is not one of its own"),
        ("ALTER TABLE runs ADD COLUMN twice GENERATED ALWAYS AS (cases * 2)", "table 'runs' is not as made"),
        ("DROP TABLE tokens", "table 'tokens' is not in it"),
    ],
)
def test_what_nanolib_does_not_write_is_refused_in_one_line_and_nothing_comes_in(theirs, ours, change, told):
    _execute(theirs, change)
    before = contents(ours)
    ended = _nano("merge", str(theirs), folder=ours.parent)
    assert ended.exit_code == 2 and told in ended.output, ended.output
    assert len(ended.output.splitlines()) == 1 and str(theirs) in ended.output
    assert contents(ours) == before
    if change.startswith("UPDATE measurements"):
        assert "run 12345678, " in ended.output


def test_a_refused_row_leaves_out_the_good_ones_before_it(theirs, ours):
    with Store(theirs) as store:
        store.add(Run("attention", MACHINE, rows={"c": ({}, [exact("flops", 1)])}, run_id="00000000"))
        store.connection.execute("UPDATE measurements SET n = -1 WHERE run_id != '00000000'")
    with Store(ours) as store:
        with pytest.raises(BadInput, match="run 12345678, measurements 1 case latency: n: -1 is no count"):
            store.merge(theirs)
        assert list(store.runs().run_id) == ["ours"]
        assert store.merge(theirs, ["00000000"]) == 1  # what is not asked for is not looked at


def test_queries_that_do_not_end_are_ended(theirs, ours, monkeypatch):
    monkeypatch.setattr(merging, "_MOST_STEPS", -(10**7))  # as if the little file took ages
    monkeypatch.setattr(merging, "_STEPS", 10)
    with Store(ours) as store, pytest.raises(BadInput, match="it cannot be read \\(interrupted\\)"):
        store.merge(theirs)


def test_a_database_that_is_merged_stays_as_it_is_to_the_byte(theirs, ours):
    before = {file.name: file.read_bytes() for file in theirs.parent.glob("theirs*")}
    with Store(ours) as store:
        assert store.merge(theirs) == 1
    assert {file.name: file.read_bytes() for file in theirs.parent.glob("theirs*")} == before


def _older(path, *more):
    """A database of the first schema with one run."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.executescript(MIGRATIONS[0])
        db.execute("INSERT INTO machines VALUES ('m1', 'c', 2, 8, '[]', 's', 'd', '2', 2, 'g', '{}')")
        run = (
            "old",
            "attention",
            "",
            "",
            "m1",
            "cpu",
            "{}",
            "{}",
            "",
            "",
            1,
            "2026-01-01T00:00:00Z",
            1.0,
            "done",
            "",
            "",
            "",
        )
        db.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(run))})", run)
        for statement in (*more, f"PRAGMA application_id = {APPLICATION_ID}", "PRAGMA user_version = 1"):
            db.execute(statement)


def test_an_older_database_is_merged_from_a_copy(tmp_path, ours):
    _older(tmp_path / "old.sqlite")
    before = (tmp_path / "old.sqlite").read_bytes()
    with Store(ours) as store:
        assert store.merge(tmp_path / "old.sqlite") == 1
        assert set(store.runs().run_id) == {"ours", "old"}
    assert (tmp_path / "old.sqlite").read_bytes() == before


def test_an_older_databases_trigger_never_runs(tmp_path, ours):
    _older(tmp_path / "old.sqlite", "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END")
    before = (tmp_path / "old.sqlite").read_bytes()
    with Store(ours) as store, pytest.raises(BadInput, match="trigger 't' is not one of its own"):
        store.merge(tmp_path / "old.sqlite")
    assert (tmp_path / "old.sqlite").read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE runs SET params = 'x' WHERE run_id = 'bad'",
        "UPDATE runs SET started = x'ff' WHERE run_id = 'bad'",
        "UPDATE runs SET status = CAST(x'ff' AS TEXT) WHERE run_id = 'bad'",
        "UPDATE runs SET machine_id = 'm2' WHERE run_id = 'bad'",
        "UPDATE runs SET run_id = NULL WHERE run_id = 'bad'",
        "UPDATE runs SET run_id = x'62616400' WHERE run_id = 'bad'",
        "UPDATE runs SET run_id = CAST(x'ff' AS TEXT) WHERE run_id = 'bad'",
    ],
)
def test_a_run_that_is_broken_in_our_own_is_listed_as_such_and_can_be_removed(ours, change):
    with Store(ours) as store:
        store.add(Run("model", MACHINE, rows={"c": ({}, [exact("flops", 1)])}, run_id="bad"))
    _execute(ours, "PRAGMA foreign_keys = OFF", change)
    listed = _nano("runs", folder=ours.parent)
    assert listed.exit_code == 0
    with Store(ours) as store:
        (broken,) = store.runs().query("experiment == 'model'").to_dict("records")
        assert broken["status"] == ("broken" if "machine_id" not in change else "done")
    if "machine_id" not in change:
        assert f"nano clean --run {broken['run_id']} removes it" in broken["message"]
    assert _nano("clean", "--run", broken["run_id"], folder=ours.parent).output.endswith("\n1 run(s) were deleted\n")
    with Store(ours) as store:
        assert list(store.runs().run_id) == ["ours"]


def test_a_broken_row_is_shown_as_a_case_that_failed_beside_the_good_ones(ours):
    _execute(ours, "UPDATE measurements SET estimate = 'x'")
    with Store(ours) as store:
        (row,) = store.measurements(["ours"], samples=True).to_dict("records")
        assert (row["metric"], row["status"], row["run_id"]) == ("case_time", "error", "ours")
        assert (
            row["message"]
            == "row 1 is broken: its estimate is not what nanolib writes; nano clean --run ours removes its run"
        )
        page = build(store, ["ours"], ours.parent / "report", SECTIONS, pictures=False).read_text(encoding="utf-8")
    assert "row 1 is broken" in page
    assert len(load(Params(runs=["all"], database=str(ours)))[2]) == 1


def test_a_row_that_lacks_what_charts_need_fails_in_the_report_alone(ours):
    with Store(ours) as store:
        assert list(store.measurements(["ours"]).status) == ["ok"]
        rows, _ = store.shown(["ours"])
    assert rows.message.iloc[0].startswith("row 1 is broken: its factors")


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


@pytest.mark.parametrize("command", [["runs"], ["history"], ["export", "x.json"], ["report", "all"]])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("ALTER TABLE runs ADD COLUMN z", "runs has a column 'z' that is none of its own; drop it"),
        ("PRAGMA user_version = 0", "already exists); move it away"),
    ],
)
def test_a_database_whose_tables_are_not_its_own_is_told_in_one_line(ours, command, change, told, monkeypatch):
    monkeypatch.chdir(ours.parent)
    _execute(ours, change)
    ended = _nano(*command, folder=ours.parent)
    assert ended.exit_code == 2 and told in ended.output and len(ended.output.splitlines()) == 1


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
        assert contents(theirs)[3:] == [(table, []) for table, _ in contents(theirs)[3:]]


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


def test_a_cell_of_any_kind_can_be_made():
    """What the examples rest on: values against the column's type, with the tables declared as they were."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "r.sqlite"
        make_good(path)
        put(path, Change("measurements", 11, 0, b"\xff", as_text=True))
        put(path, Change("runs", 1, 0, None))
        put(path, Change("measurements", 7, 0, ["x"], key=0))
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.text_factory = bytes  # as text it could not be read
            assert db.execute("SELECT typeof(estimate) FROM measurements ORDER BY id").fetchone() == (b"text",)
            assert db.execute("SELECT count(*) FROM runs WHERE typeof(experiment) = 'null'").fetchone() == (1,)
            assert ["x"] in json.loads(
                db.execute("SELECT factors FROM measurements ORDER BY id").fetchone()[0]
            ).values()
            db.text_factory = str
            assert merging.check_objects(db, "main", len(MIGRATIONS)) is None
