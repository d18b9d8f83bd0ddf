"""Runs and rows as they go in, come out and are merged."""

import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolib.measurement import BadInput, Flag, Measurement, Provenance, Status, exact
from nanolib.report.export import write
from nanolib.store import Store
from nanolib.store.schema import SCHEMA_VERSION
from tests.store.rows import LATENCY, MACHINE, make_run


def test_the_table_has_the_documented_columns(store):
    columns = {row[1] for row in store.connection.execute("PRAGMA table_info(measurements)")}
    documented = (
        "run_id experiment suite label machine_id case_id factors metric unit estimate low high confidence n samples "
    )
    documented += "predicted provenance method scope status message flags details"
    assert set(documented.split()) <= columns


def test_the_pragmas_are_in_force(store):
    def pragma(name):
        return store.connection.execute(f"PRAGMA {name}").fetchone()[0]

    assert (pragma("journal_mode"), pragma("foreign_keys"), pragma("auto_vacuum")) == ("wal", 1, 2)
    assert (pragma("synchronous"), pragma("busy_timeout"), pragma("user_version")) == (1, 30_000, SCHEMA_VERSION)


def test_where_there_is_no_wal_every_write_is_waited_for(tmp_path, monkeypatch):
    """As on a network file system, which answers with the mode that stays in force."""
    monkeypatch.setattr(Store, "_patiently", lambda self, _: self.connection.execute("PRAGMA journal_mode = DELETE"))
    with Store(tmp_path / "r.sqlite") as store:
        assert store.journal_mode == "delete"
        assert store.connection.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_a_run_comes_back_as_it_went_in(store):
    run_id = store.add(make_run(label="mine"))
    rows = store.measurements(samples=True)
    first = rows.iloc[0]
    assert (first.run_id, first.experiment, first.label, first.machine_id) == (run_id, "attention", "mine", "m1")
    assert (first.estimate, first.low, first.high, first.unit, first.predicted) == (1.5, 1.0, 2.0, "ms", 1.2)
    assert first.factors == {"seq_len": 8, "name": "dense"} and first["factor.seq_len"] == 8
    assert first["flags"] == ["slowdown"] and first.details == {"mean": 1.5}
    assert first.samples.dtype == np.float64 and list(first.samples) == [1.0, 1.5, 2.0]
    assert (first.provenance, first.status) == (Provenance.MEASURED, Status.OK)
    assert store.runs().status.iloc[0] == "done" and store.machines().gpus.iloc[0] == [{"name": "g"}]


def test_a_case_is_replaced_whole_or_not_at_all(store):
    run_id = store.add(make_run())
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_case(
            run_id, "case1", {}, [exact("flops", 1), exact("flops", 1, scope="x", details={"a": float("nan")})]
        )
    assert len(store.measurements()) == 2
    store.write_case(run_id, "case1", {}, [exact("flops", 7)])
    assert list(store.measurements().estimate) == [7]


def test_a_row_of_an_unknown_run_is_told(store):
    with pytest.raises(BadInput, match="run: nowhere is not in the database"):
        store.write_case("nowhere", "c", {}, [LATENCY])


def test_deleting_a_run_takes_its_rows_along(store):
    store.add(make_run())
    store.connection.execute("DELETE FROM runs")
    assert store.measurements().empty


def test_merge_brings_runs_in_once(tmp_path, store):
    with Store(tmp_path / "other.sqlite") as other:
        other.add(make_run("a"))
        assert store.merge(tmp_path / "other.sqlite") == 1
        other.add(make_run("b"))
    assert store.merge(tmp_path / "other.sqlite") == 1
    assert store.merge(tmp_path / "other.sqlite") == 0
    assert sorted(store.measurements().run_id) == ["a", "a", "b", "b"]


def test_merge_gives_the_same_in_either_order(tmp_path):
    for name, ids in (("x", "ab"), ("y", "bc")):
        with Store(tmp_path / f"{name}.sqlite") as source:
            for run_id in ids:
                source.add(make_run(run_id))
    contents = []
    for order in ("xy", "yx"):
        with Store(tmp_path / f"{order}.sqlite") as target:
            for name in order:
                target.merge(tmp_path / f"{name}.sqlite")
            rows = target.measurements().drop(columns="id").sort_values(["run_id", "metric"])
            contents.append(rows.astype(str).to_numpy().tolist())
    assert contents[0] == contents[1]


def test_merge_prefers_a_run_that_is_done(tmp_path, store):
    store.add(make_run("a", rows={}))  # running
    with Store(tmp_path / "other.sqlite") as other:
        other.add(make_run("a"))
    assert store.merge(tmp_path / "other.sqlite") == 1
    assert store.runs().status.iloc[0] == "done" and len(store.measurements()) == 2


def test_a_database_is_not_merged_into_itself(store):
    with pytest.raises(BadInput, match="is this database itself"):
        store.merge(store.path)


def test_a_database_that_is_not_there_is_not_made_by_merging_it(store, tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        store.merge(tmp_path / "none.sqlite")
    assert not (tmp_path / "none.sqlite").exists()


def test_clean_deletes_old_runs_and_shrinks_the_file(tmp_path, store):
    big = Measurement("latency", 1.0, samples=tuple(range(200_000)))
    store.add(make_run("old", rows={"c": ({}, [big])}))
    store.add(make_run("new"))
    store.connection.execute("UPDATE runs SET started = '2020-01-01T00:00:00.000000Z' WHERE run_id = 'old'")
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = store.path.stat().st_size
    assert store.cleanup_old_runs(30, dry_run=True) == ["old"] and len(store.runs()) == 2
    assert store.cleanup_old_runs(30) == ["old"]
    assert list(store.runs().run_id) == ["new"] and store.path.stat().st_size < before - 1_000_000


def test_a_copy_for_sharing_names_no_process_and_no_folder(tmp_path, store):
    store.add(make_run("a", process="host:1:2", params={"corpus": "/home/someone/text", "seed": 1}))
    store.add(make_run("b"))
    store.copy_to(tmp_path / "share.sqlite", ["a"])
    assert b"/home/someone" not in (tmp_path / "share.sqlite").read_bytes()
    with Store(tmp_path / "share.sqlite") as shared:
        assert list(shared.runs().run_id) == ["a"] and shared.runs().process.iloc[0] == ""
        assert shared.runs().params.iloc[0] == {"seed": 1}
    with pytest.raises(BadInput, match="exists; name a new file"):
        store.copy_to(tmp_path / "share.sqlite", ["a"])


def test_names_stand_for_runs(store):
    for run_id, label, launch in (("aaaa1", "", "one"), ("aaaa2", "night", "one"), ("bbbb1", "", "two")):
        store.add(make_run(run_id, label, launch=launch))
    assert store.resolve("latest") == ["bbbb1"] and store.resolve("latest~1") == ["aaaa1", "aaaa2"]
    assert store.resolve("night") == ["aaaa2"] and store.resolve("bbbb") == ["bbbb1"]
    assert store.resolve("attention") == store.resolve("all") == ["aaaa1", "aaaa2", "bbbb1"]
    for name in ("nothing", "latest~2", "latest~x", ""):
        with pytest.raises(BadInput, match="run: "):
            store.resolve(name)


def test_two_connections_write_at_once(tmp_path):
    with Store(tmp_path / "r.sqlite") as a, Store(tmp_path / "r.sqlite") as b:
        for i in range(20):
            (a, b)[i % 2].add(make_run(f"run{i}"))
        assert len(a.runs()) == len(b.runs()) == 20


def test_labels_are_stored_as_text_whatever_they_hold(store):
    label = "'; DROP TABLE runs; -- <script>\U0001f600"
    store.add(make_run(label=label))
    assert store.resolve(label) and json.dumps(store.runs().label.iloc[0]) == json.dumps(label)


def test_several_that_make_the_same_database_at_once_all_get_it(tmp_path):
    def make(path):
        barrier.wait()
        Store(path).close()

    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        for number in range(25):
            for done in [pool.submit(make, tmp_path / f"{number}.sqlite") for _ in range(4)]:
                done.result()
            with Store(tmp_path / f"{number}.sqlite", create=False) as store:
                assert store.runs().empty


# merge: of what several people hold of the same runs, one result


_RUN = st.tuples(
    st.sampled_from(["r1", "r2", "r3"]),
    st.sampled_from(["done", "running", "interrupted", "failed"]),
    st.sets(st.integers(0, 3)),  # cases that have ended; of a run that is done all have
    st.sampled_from(["2.11", "2.13"]),
    st.sampled_from([1.0, 2.0]),  # what was measured: an interrupted run may have been resumed on two sides
)


_HELD = st.lists(_RUN, max_size=3, unique_by=lambda run: run[0])


def _hold(path, held):
    with Store(path) as store:
        for run_id, status, ended, torch, level in held:
            ended = {0, 1, 2, 3} if status == "done" else ended
            rows = {f"c{n}": ({"n": n}, [Measurement("case_time", n + level, n=1)]) for n in ended}
            started = Measurement("case_time", status=Status.STARTED, message=f"{level}")
            rows |= {} if status == "done" else {"in flight": ({"n": 9}, [started])}
            store.add(make_run(run_id, machine=MACHINE | {"torch": torch}, rows=rows))
            store.update_run(run_id, status=status, duration_s=level if status == "done" else 1.0)


def _held(path):
    with Store(path, create=False) as store:
        runs = store.connection.execute("SELECT run_id, status, duration_s FROM runs ORDER BY 1").fetchall()
        rows = store.connection.execute(
            "SELECT run_id, case_id, estimate, message FROM measurements ORDER BY 1, 2"
        ).fetchall()
        return runs, rows, store.connection.execute("SELECT machine_id, torch FROM machines").fetchall()


@settings(max_examples=40)
@given(_HELD, _HELD, _HELD)
def test_a_merge_is_the_same_in_any_order_and_however_often(one, two, three):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, held in (("1", one), ("2", two), ("3", three)):
            _hold(folder / file, held)
        results = []
        for order in ("123", "321", "213", "1231", "112233"):
            with Store(folder / f"into-{order}") as store:
                for file in order:
                    store.merge(folder / file)
            results.append(_held(folder / f"into-{order}"))
        assert all(result == results[0] for result in results)
        runs, rows, _ = results[0]
        ended = {run_id: {case for run, case, *_ in rows if run == run_id} for run_id, *_ in runs}
        for run_id, _, cases, *_ in (*one, *two, *three):
            assert ended[run_id] >= {f"c{case}" for case in cases}  # nothing that ended anywhere is missing


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


_FLOAT = st.floats(allow_nan=False, allow_infinity=False)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _FLOAT | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(
    factors=st.dictionaries(st.text("abc_", min_size=1, max_size=5), _JSON, min_size=1, max_size=3),
    samples=st.lists(_FLOAT, max_size=5),
    ends=st.tuples(_FLOAT, _FLOAT, _FLOAT).map(sorted),
    message=_TEXT,
    details=st.dictionaries(_TEXT, _JSON, max_size=3),
    flags=st.lists(st.sampled_from(list(Flag)), unique=True, max_size=3),
    label=_TEXT,
)
def test_whatever_a_measurement_holds_comes_back_as_it_was(factors, samples, ends, message, details, flags, label):
    low, estimate, high = ends
    row = Measurement(
        "latency",
        estimate,
        low,
        high,
        0.95,
        len(samples),
        samples=tuple(samples),
        message=message,
        flags=tuple(flags),
        details=details,
    )
    with tempfile.TemporaryDirectory() as name, Store(Path(name) / "s.sqlite") as store:
        store.add(make_run("r", label, rows={"case": (factors, [row])}))
        (back,) = store.measurements(samples=True).to_dict("records")
        assert store.runs().label.iloc[0] == label
    assert back["factors"] == factors and back["details"] == details and back["message"] == message
    assert (back["low"], back["estimate"], back["high"]) == (low, estimate, high)
    assert list(back["samples"]) == samples and list(back["flags"]) == [flag.value for flag in flags]


def test_the_newest_runs_are_done_where_any_is(store):
    old, new, running = (store.add(make_run(label=label)) for label in ("old", "new", "running"))
    failed = store.add(make_run(label="failed", experiment="warmup"))
    other = store.add(make_run(label="failed later", experiment="warmup"))
    store.update_run(running, status="running")
    for run_id in (failed, other):
        store.update_run(run_id, status="failed")
    assert store.newest_runs() == [new, other]
    assert list(store.runs_of([new, old, "absent"]).run_id) == [old, new]


def test_nothing_that_is_shared_tells_of_folders_or_hosts(tmp_path, store):
    home, host = "/home/alice/texts", "alice-laptop.corp.example"
    message = f"FileNotFoundError: '{home}/a diary.txt' is not at {host}:29400; see https://docs.pytorch.org/x/y 3/4"
    ended = Measurement(
        "case_time", 1.0, status=Status.ERROR, message=message, details={"traceback": f"in {home}/x.py"}
    )
    factors = {"corpus": f"{home}/diary.txt", "model_options": {"path": f"{home}/model.bin"}, "name": "a/b"}
    params = {"rendezvous": f"{host}:29400", "seed": 1}
    store.add(make_run("a", params=params, rows={"c": (factors, [ended])}))
    store.update_run("a", status="running", message=message)
    for ending in ("sqlite", "json", "csv", "md"):
        write(store, ["a"], tmp_path / f"share.{ending}")
        content = (tmp_path / f"share.{ending}").read_text(encoding="utf-8", errors="replace")
        assert "alice" not in content and "/home" not in content and "https://docs.pytorch.org/x/y 3/4" in content
    with Store(tmp_path / "share.sqlite") as shared:
        assert shared.runs().status.iloc[0] == "interrupted" and shared.runs().params.iloc[0] == {"seed": 1}
        assert shared.measurements().factors.iloc[0] == {"model_options": {"path": "…/model.bin"}, "name": "a/b"}


def test_json_keeps_every_digit(tmp_path, store):
    tiny = Measurement("relative_error", 1.2345678901234e-17, 1e-17, 2e-17, 0.95, 3)
    store.add(make_run("a", rows={"c": ({"name": "x"}, [tiny])}))
    write(store, ["a"], tmp_path / "share.json")
    (row,) = json.loads((tmp_path / "share.json").read_text())["measurements"]
    assert (row["estimate"], row["low"], row["predicted"]) == (1.2345678901234e-17, 1e-17, None)


def test_a_runs_new_label_is_that_of_its_rows(store):
    store.add(make_run("a", label="old"))
    store.add(make_run("b", label="old"))
    store.update_run("a", label="new")
    rows = store.measurements()
    assert set(zip(rows.run_id, rows.label, strict=True)) == {("a", "new"), ("b", "old")}
