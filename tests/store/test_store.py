import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolib.measurement import BadInput, Flag, Measurement, Provenance, Status, exact
from nanolib.paths import checkout
from nanolib.report.export import write
from nanolib.store import Run, Store
from nanolib.store.schema import SCHEMA_VERSION

MACHINE = {
    "machine_id": "m1",
    "cpu": "c",
    "cores": 2,
    "ram_gib": 8,
    "gpus": [{"name": "g"}],
    "dtypes": {"float32": "avx"},
}
LATENCY = Measurement(
    "latency",
    1.5,
    1.0,
    2.0,
    0.95,
    3,
    (1.0, 1.5, 2.0),
    predicted=1.2,
    method="perf_counter",
    scope="forward",
    flags=(Flag.SLOWDOWN,),
    details={"mean": np.float64(1.5)},
)


def _run(run_id="", label="", **rest):
    rows = {"case1": ({"seq_len": 8, "name": "dense"}, [LATENCY, exact("flops", 42)])}
    values = {"experiment": "attention", "machine": MACHINE, "params": {"seed": 1}, "label": label, "rows": rows} | rest
    return Run(**values, **({"run_id": run_id} if run_id else {}))


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "results.sqlite") as opened:
        yield opened


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
    assert (pragma("synchronous"), pragma("busy_timeout"), pragma("user_version")) == (1, 5000, SCHEMA_VERSION)


def test_where_there_is_no_wal_every_write_is_waited_for(tmp_path, monkeypatch):
    """As on a network file system, which answers with the mode that stays in force."""
    monkeypatch.setattr(Store, "_patiently", lambda self, _: self.connection.execute("PRAGMA journal_mode = DELETE"))
    with Store(tmp_path / "r.sqlite") as store:
        assert store.journal_mode == "delete"
        assert store.connection.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_a_run_comes_back_as_it_went_in(store):
    run_id = store.add(_run(label="mine"))
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
    run_id = store.add(_run())
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
    store.add(_run())
    store.connection.execute("DELETE FROM runs")
    assert store.measurements().empty


def test_merge_brings_runs_in_once(tmp_path, store):
    store.add(_run("a"))
    with Store(tmp_path / "other.sqlite") as other:
        other.add(_run("a"))
        other.add(_run("b"))
    assert store.merge(tmp_path / "other.sqlite") == 1
    assert store.merge(tmp_path / "other.sqlite") == 0
    assert sorted(store.measurements().run_id) == ["a", "a", "b", "b"]


def test_merge_gives_the_same_in_either_order(tmp_path):
    for name, ids in (("x", "ab"), ("y", "bc")):
        with Store(tmp_path / f"{name}.sqlite") as source:
            for run_id in ids:
                source.add(_run(run_id))
    contents = []
    for order in ("xy", "yx"):
        with Store(tmp_path / f"{order}.sqlite") as target:
            for name in order:
                target.merge(tmp_path / f"{name}.sqlite")
            rows = target.measurements().drop(columns="id").sort_values(["run_id", "metric"])
            contents.append(rows.astype(str).to_numpy().tolist())
    assert contents[0] == contents[1]


def test_merge_prefers_a_run_that_is_done(tmp_path, store):
    store.add(_run("a", rows={}))  # running
    with Store(tmp_path / "other.sqlite") as other:
        other.add(_run("a"))
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
    store.add(_run("old", rows={"c": ({}, [big])}))
    store.add(_run("new"))
    store.connection.execute("UPDATE runs SET started = '2020-01-01T00:00:00.000000Z' WHERE run_id = 'old'")
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = store.path.stat().st_size
    assert store.cleanup_old_runs(30, dry_run=True) == ["old"] and len(store.runs()) == 2
    assert store.cleanup_old_runs(30) == ["old"]
    assert list(store.runs().run_id) == ["new"] and store.path.stat().st_size < before - 1_000_000


def test_a_copy_for_sharing_names_no_process_and_no_folder(tmp_path, store):
    store.add(_run("a", process="host:1:2", params={"corpus": "/home/someone/text", "seed": 1}))
    store.add(_run("b"))
    store.copy_to(tmp_path / "share.sqlite", ["a"])
    assert b"/home/someone" not in (tmp_path / "share.sqlite").read_bytes()
    with Store(tmp_path / "share.sqlite") as shared:
        assert list(shared.runs().run_id) == ["a"] and shared.runs().process.iloc[0] == ""
        assert shared.runs().params.iloc[0] == {"seed": 1}
    with pytest.raises(BadInput, match="exists; name a new file"):
        store.copy_to(tmp_path / "share.sqlite", ["a"])


def test_names_stand_for_runs(store):
    for run_id, label, launch in (("aaaa1", "", "one"), ("aaaa2", "night", "one"), ("bbbb1", "", "two")):
        store.add(_run(run_id, label, launch=launch))
    assert store.resolve("latest") == ["bbbb1"] and store.resolve("latest~1") == ["aaaa1", "aaaa2"]
    assert store.resolve("night") == ["aaaa2"] and store.resolve("bbbb") == ["bbbb1"]
    assert store.resolve("attention") == store.resolve("all") == ["aaaa1", "aaaa2", "bbbb1"]
    for name in ("nothing", "latest~2", "latest~x", ""):
        with pytest.raises(BadInput, match="run: "):
            store.resolve(name)


@pytest.mark.parametrize("content", [b"", b"hello, I am no database at all" * 100])
def test_a_file_that_is_not_ours_is_told_and_left_alone(tmp_path, content):
    path = tmp_path / "x.sqlite"
    path.write_bytes(content)
    if content:
        with pytest.raises(BadInput, match="cannot be opened"):
            Store(path)
        assert path.read_bytes() == content
    else:
        Store(path).close()  # an empty file is an empty database


def test_another_programs_database_is_told(tmp_path):
    with sqlite3.connect(tmp_path / "x.sqlite") as other:
        other.execute("CREATE TABLE t (a)")
    with pytest.raises(BadInput, match="is not nanolib's"):
        Store(tmp_path / "x.sqlite")


def test_a_newer_database_is_told(tmp_path, store):
    store.connection.execute("PRAGMA user_version = 99")
    with pytest.raises(BadInput, match="has schema 99, newer than"):
        Store(store.path)


def test_a_missing_database_is_told_and_not_made(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        Store(tmp_path / "no.sqlite", create=False)
    assert not (tmp_path / "no.sqlite").exists()


def test_two_connections_write_at_once(tmp_path):
    with Store(tmp_path / "r.sqlite") as a, Store(tmp_path / "r.sqlite") as b:
        for i in range(20):
            (a, b)[i % 2].add(_run(f"run{i}"))
        assert len(a.runs()) == len(b.runs()) == 20


def test_labels_are_stored_as_text_whatever_they_hold(store):
    label = "'; DROP TABLE runs; -- <script>\U0001f600"
    store.add(_run(label=label))
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
)
_HELD = st.lists(_RUN, max_size=3, unique_by=lambda run: run[0])


def _hold(path, held):
    with Store(path) as store:
        for run_id, status, ended, torch in held:
            ended = {0, 1, 2, 3} if status == "done" else ended
            rows = {f"c{n}": ({"n": n}, [Measurement("case_time", float(n), n=1)]) for n in ended}
            store.add(_run(run_id, machine=MACHINE | {"torch": torch}, rows=rows))
            store.update_run(run_id, status=status)


def _held(path):
    with Store(path, create=False) as store:
        runs = store.connection.execute("SELECT run_id, status, machine_id FROM runs ORDER BY run_id").fetchall()
        rows = store.connection.execute("SELECT run_id, case_id, estimate FROM measurements ORDER BY 1, 2").fetchall()
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
        ended = {run_id: {case for run, case, _ in rows if run == run_id} for run_id, *_ in runs}
        for run_id, _, cases, _ in (*one, *two, *three):
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
        store.add(_run("r", label, rows={"case": (factors, [row])}))
        (back,) = store.measurements(samples=True).to_dict("records")
        assert store.runs().label.iloc[0] == label
    assert back["factors"] == factors and back["details"] == details and back["message"] == message
    assert (back["low"], back["estimate"], back["high"]) == (low, estimate, high)
    assert list(back["samples"]) == samples and list(back["flags"]) == [flag.value for flag in flags]


_FILLING = """
import resource, sys
from nanolib.measurement import BadInput, Measurement
from nanolib.store import Run
from nanolib.store import Store
from tests.store.test_store import MACHINE

resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))  # as on a disk that fills up
with Store(sys.argv[1]) as store:
    try:
        for number in range(1000):
            big = Measurement("latency", 1.0, samples=tuple(map(float, range(500))))
            store.add(Run("attention", MACHINE, rows={"case": ({"n": number}, [big])}))
            print(number, flush=True)
    except BadInput as error:
        print(error.lines[0])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of file size")
def test_a_full_disk_is_told_and_what_was_there_stays(tmp_path):
    path = tmp_path / "results.sqlite"
    ended = subprocess.run(
        [sys.executable, "-c", _FILLING, str(path)], capture_output=True, text=True, check=True, cwd=checkout()
    )
    *stored, said = ended.stdout.splitlines()
    assert "cannot be written (d" in said and said.endswith("free space there, or name another folder")
    with Store(path, create=False) as store:
        assert store.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert len(store.runs()) == len(stored) == len(store.measurements()) > 5


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_folder_that_is_read_only_is_told(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="cannot be"):
        Store(tmp_path / "results.sqlite")


def test_a_database_that_is_cut_at_any_byte_is_told_or_whole(tmp_path):
    with Store(tmp_path / "whole.sqlite") as store:
        for number in range(40):
            store.add(_run(f"r{number}"))
    whole, rng, told = (tmp_path / "whole.sqlite").read_bytes(), random.Random(0), 0
    for number in range(60):
        at = rng.randrange(1, len(whole))
        path = tmp_path / f"{number}.sqlite"
        path.write_bytes(whole[:at])
        try:
            with Store(path, create=False) as store:
                store.runs()
                store.measurements()
        except (BadInput, sqlite3.DatabaseError):
            told += 1
        assert len(path.read_bytes()) == at  # and it is left as it is
        with Store(tmp_path / "into.sqlite") as store, pytest.raises((BadInput, sqlite3.DatabaseError)):
            store.merge(path)
            assert len(store.runs()) == 40  # a cut that hurts nothing may go through whole
            raise BadInput("whole")
        with Store(tmp_path / "into.sqlite") as store:
            assert len(store.runs()) in (0, 40)  # nothing is half taken in
            store.connection.execute("DELETE FROM runs")
    assert told > 50


def test_the_newest_runs_are_done_where_any_is(store):
    old, new, running = (store.add(_run(label=label)) for label in ("old", "new", "running"))
    failed = store.add(_run(label="failed", experiment="warmup"))
    other = store.add(_run(label="failed later", experiment="warmup"))
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
    store.add(_run("a", params=params, rows={"c": (factors, [ended])}))
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
    store.add(_run("a", rows={"c": ({"name": "x"}, [tiny])}))
    write(store, ["a"], tmp_path / "share.json")
    (row,) = json.loads((tmp_path / "share.json").read_text())["measurements"]
    assert (row["estimate"], row["low"], row["predicted"]) == (1.2345678901234e-17, 1e-17, None)


def test_what_cannot_be_written_is_read(tmp_path, store, monkeypatch):
    store.add(_run("a"))
    store.copy_to(tmp_path / "share.sqlite", ["a"])
    before = (tmp_path / "share.sqlite").read_bytes()
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "share" not in str(path) and writable(path, mode))
    with Store(tmp_path / "share.sqlite", create=False) as shared:
        assert len(shared.measurements()) == 2
        with pytest.raises(BadInput, match="cannot be written"):
            shared.add(_run("b"))
    with Store(tmp_path / "other.sqlite") as other:
        assert other.merge(tmp_path / "share.sqlite") == 1
    assert (tmp_path / "share.sqlite").read_bytes() == before


def test_an_empty_file_is_left_empty_by_who_reads(tmp_path):
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(BadInput, match=r"empty\.sqlite is empty"):
        Store(tmp_path / "empty.sqlite", create=False)
    assert not (tmp_path / "empty.sqlite").stat().st_size


def test_a_runs_new_label_is_that_of_its_rows(store):
    store.add(_run("a", label="old"))
    store.add(_run("b", label="old"))
    store.update_run("a", label="new")
    rows = store.measurements()
    assert set(zip(rows.run_id, rows.label, strict=True)) == {("a", "new"), ("b", "old")}


# what is asked of runs


def _at(store, run_id, day):
    store.connection.execute(
        "UPDATE runs SET started = ? WHERE run_id = ?", (f"2026-01-{day:02}T00:00:00.000000Z", run_id)
    )


def _cases(*names, estimate=1.0):
    return {name: ({"name": name}, [Measurement("case_time", estimate, n=1)]) for name in names}


def _shown(frame):
    return list(zip(frame.run_id, frame.case_id, strict=True))


def test_a_run_keeps_all_that_it_was_given(store):
    run = _run("a", "mine", suite="quick", device="cpu", versions={"torch": "2"}, git_revision="abc", fingerprint="f")
    run = replace(
        run, process="p", launch="l", disturbances=("a fan",), machine=MACHINE | {"governor": "g", "threads": 2}
    )
    store.add(run)
    row = store.runs().iloc[0].to_dict()
    assert {name: row[name] for name in ("experiment", "suite", "label", "machine_id", "device", "git_revision")} == {
        "experiment": "attention",
        "suite": "quick",
        "label": "mine",
        "machine_id": "m1",
        "device": "cpu",
        "git_revision": "abc",
    }
    assert (row["params"], row["versions"], row["disturbances"]) == ({"seed": 1}, {"torch": "2"}, ["a fan"])
    assert (row["fingerprint"], row["process"], row["launch"], row["cases"]) == ("f", "p", "l", 1)
    assert row["duration_s"] is None and row["message"] == "" and row["started"].endswith("Z")
    machine = store.machines().iloc[0]
    assert (machine.cpu, machine.cores, machine.ram_gib, machine.governor, machine.threads) == ("c", 2, 8, "g", 2)
    assert machine["dtypes"] == {"float32": "avx"} and machine.driver is None
    first, second = store.measurements().to_dict("records")
    assert (first["suite"], first["case_id"], first["confidence"], first["n"]) == ("quick", "case1", 0.95, 3)
    assert (first["scope"], first["method"], first["message"], first["metric"]) == (
        "forward",
        "perf_counter",
        "",
        "latency",
    )
    assert (second["metric"], second["estimate"]) == ("flops", 42) and "samples" not in second


def test_cases_are_counted_where_a_run_says_how_many_it_will_have(store):
    store.add(_run("a", rows={}, cases=7))
    assert store.runs().cases.iloc[0] == 7 and store.runs().status.iloc[0] == "running"


def test_of_a_case_in_several_runs_the_newest_on_each_machine_is_shown(store):
    for day, (run_id, machine, cases) in enumerate(
        [("a", "m1", "xy"), ("b", "m1", "xz"), ("c", "m2", "x"), ("d", "m1", "z")], 1
    ):
        store.add(_run(run_id, machine=MACHINE | {"machine_id": machine}, rows=_cases(*cases)))
        _at(store, run_id, day)
    assert _shown(store.measurements(newest=9)) == [("a", "y"), ("b", "x"), ("c", "x"), ("d", "z")]
    assert _shown(store.measurements(newest=2)) == [("c", "x"), ("d", "z")]
    assert _shown(store.measurements(["a", "b"], newest=9)) == [("a", "y"), ("b", "x"), ("b", "z")]
    assert _shown(store.measurements(["a"])) == [("a", "x"), ("a", "y")]
    assert store.count_cases("abcd") == 4 and store.count_cases("a") == 2 and store.count_cases([]) == 0
    rows, runs = store.shown("abcd")
    assert _shown(rows) == [("a", "y"), ("b", "x"), ("c", "x"), ("d", "z")] and "samples" in rows
    assert list(runs.run_id) == list("abcd")


def test_runs_of_one_moment_follow_the_order_in_which_they_came(store):
    for run_id in "ab":
        store.add(_run(run_id, rows=_cases("x")))
        _at(store, run_id, 1)
    assert _shown(store.measurements(newest=5)) == [("b", "x")]
    assert store.newest_runs() == ["b"] and list(store.runs().run_id) == ["a", "b"]


def test_the_limit_of_cases_is_of_each_experiment(store):
    for run_id, experiment in (("a", "attention"), ("b", "model")):
        store.add(_run(run_id, experiment=experiment, rows=_cases(*(f"{run_id}{n}" for n in range(3)))))
    rows = store.measurements(newest=2)
    assert sorted(rows.experiment) == ["attention"] * 2 + ["model"] * 2


def test_a_run_that_shows_no_case_is_among_those_shown(store, monkeypatch):
    monkeypatch.setattr("nanolib.store.reading.SHOWN_CASES", 2)
    for day, run_id in enumerate("abcd", 1):
        store.add(_run(run_id, rows=_cases("x") if run_id != "d" else {}))
        _at(store, run_id, day)
    rows, runs = store.shown("abcd")
    assert _shown(rows) == [("c", "x")] and list(runs.run_id) == ["c", "d"]


def test_a_history_has_one_metric_of_the_last_runs_of_each_machine(store):
    for day, (run_id, machine, experiment) in enumerate(
        [("a", "m1", "attention"), ("b", "m1", "attention"), ("c", "m2", "attention"), ("d", "m1", "model")], 1
    ):
        rows = {"x": ({"name": "x"}, [LATENCY, exact("flops", day)])}
        store.add(
            _run(run_id, machine=MACHINE | {"machine_id": machine}, experiment=experiment, rows=rows, git_revision="r")
        )
        _at(store, run_id, day)
    found = store.figures("flops", ["m1"])
    assert list(zip(found.run_id, found.estimate, strict=True)) == [("a", 1), ("b", 2), ("d", 4)]
    assert list(store.figures("flops", ["m1"], last=1).run_id) == ["b", "d"]
    assert list(store.figures("flops", ["m1", "m2"], last=1).run_id) == ["b", "c", "d"]
    one = store.figures("latency", ["m2"]).iloc[0]
    assert (one.low, one.estimate, one.high, one.scope, one.method) == (1.0, 1.5, 2.0, "forward", "perf_counter")
    assert (one.git_revision, one.case_id, one.experiment, json.loads(one.factors)) == (
        "r",
        "x",
        "attention",
        {"name": "x"},
    )


def test_a_figure_without_a_number_is_no_history(store):
    store.add(_run("a", rows={"x": ({}, [Measurement("latency", status=Status.UNSUPPORTED, message="no"), LATENCY])}))
    assert len(store.figures("latency", ["m1"])) == 1


def test_the_run_before_is_the_last_done_of_its_like(store):
    kinds = {
        "a": {},
        "b": {},
        "c": {"suite": "full"},
        "d": {"machine": MACHINE | {"machine_id": "m2"}},
        "e": {"experiment": "model"},
        "f": {"rows": {}},  # it never ended
        "g": {},
        "h": {"experiment": "model"},
    }
    for day, (run_id, rest) in enumerate(kinds.items(), 1):
        store.add(_run(run_id, **rest))
        _at(store, run_id, day)
    assert store.runs_before(["g"]) == ["b"] and store.runs_before(["b"]) == ["a"] and store.runs_before(["a"]) == []
    assert store.runs_before(["g", "h", "f"]) == ["b", "e"] and store.runs_before(["g", "h"], but="model") == ["b"]


def test_cases_that_began_and_cases_that_ended_are_told_apart(store):
    store.add(_run("a", rows={}))
    for name, status, seconds in (("x", Status.OK, 2.0), ("y", Status.ERROR, 3.0), ("z", Status.OK, 5.0)):
        store.write_case("a", name, {}, [Measurement("case_time", seconds, n=1, status=status, message="m"), LATENCY])
    started = Measurement("case_time", status=Status.STARTED, details={"attempts": 2})
    store.write_case("a", "w", {}, [started])
    assert store.finished_cases("a") == {"x", "y", "z"} and store.started_attempts("a") == {"w": 2}
    assert sorted(store.case_endings("a")) == [("error", 1, 3.0), ("ok", 2, 7.0), ("started", 1, 0.0)]
    assert store.finished_cases("b") == set() and store.started_attempts("b") == {} and store.case_endings("b") == []


def test_only_what_changes_in_a_run_can_be_set(store):
    store.add(_run("a"))
    store.add(_run("b"))
    store.update_run("a", status="failed", message="why", duration_s=2.5, process="p", launch="l", cases=9, suite="s")
    rows = store.runs().set_index("run_id")
    assert list(rows.loc["a", ["status", "message", "duration_s", "process", "launch", "cases", "suite"]]) == [
        "failed",
        "why",
        2.5,
        "p",
        "l",
        9,
        "s",
    ]
    assert rows.loc["b", "status"] == "done" and set(store.measurements(["a"]).suite) == {"s"}
    assert set(store.measurements(["b"]).suite) == {""}
    with pytest.raises(
        BadInput, match="run: device, git_revision cannot be set; only cases, duration_s, label, launch, "
    ):
        store.update_run("a", git_revision="x", device="y", label="z")
    assert store.runs().label.iloc[0] == ""


def test_a_name_is_looked_for_among_labels_first_and_then_experiments_suites_and_ids(store):
    store.add(_run("abcd1", "quick"))
    store.add(_run("abcd2", suite="quick"))
    store.add(_run("abce3", "warmup"))
    store.add(_run("abcf4", experiment="warmup"))
    assert store.resolve("quick") == ["abcd1"] and store.resolve("warmup") == ["abce3"]
    assert store.resolve("abcd") == ["abcd1", "abcd2"] and store.resolve("abcf4") == ["abcf4"]
    assert store.resolve("latest~0") == store.resolve("latest") == store.resolve("latest~") == ["abcf4"]
    assert store.resolve("latest~3") == ["abcd1"]
    with pytest.raises(BadInput, match="run: 'latest~4' is not there; the database holds 4 launches"):
        store.resolve("latest~4")
    with pytest.raises(BadInput, match="'latest~1000000000' is not there"):
        store.resolve("latest~1000000000")
    with pytest.raises(BadInput, match="run: 'abc' is not in the database; `nano runs` lists what is"):
        store.resolve("abc")  # three characters are too few for the beginning of an id


def test_old_runs_go_by_age_or_number_and_running_ones_stay(store):
    for run_id in "abcd":
        store.add(_run(run_id, rows={} if run_id == "b" else _cases("x")))
    for run_id, age in (("a", 40), ("b", 40), ("c", 20)):
        moment = f"strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{age} days')"
        store.connection.execute(f"UPDATE runs SET started = {moment} WHERE run_id = ?", (run_id,))
    assert store.cleanup_old_runs(dry_run=True) == ["a"]
    assert store.cleanup_old_runs(10, dry_run=True) == ["a", "c"]
    assert store.cleanup_old_runs(None, dry_run=True) == []
    assert store.cleanup_old_runs(None, max_runs=4, dry_run=True) == []
    assert store.cleanup_old_runs(None, max_runs=2, dry_run=True) == ["a"]
    assert store.cleanup_old_runs(None, max_runs=0, dry_run=True) == ["a", "c", "d"]
    assert store.cleanup_old_runs(0, dry_run=True)[:2] == ["a", "c"]
    for limits in ({"max_age_days": -1}, {"max_age_days": float("nan")}, {"max_runs": -1}):
        (name, value), *_ = limits.items()
        with pytest.raises(BadInput, match=f"{name}: {value} will not do; give 0 or more"):
            store.cleanup_old_runs(**limits)
    assert len(store.runs()) == 4
    assert store.cleanup_old_runs() == ["a"] and list(store.runs().run_id) == ["b", "c", "d"]


# the file itself


def test_a_statement_is_tried_again_while_the_file_is_locked_and_no_longer(store, monkeypatch):
    waits, real = [], store.connection

    class Locked:
        left, message = 3, "database is locked"

        def execute(self, statement):
            self.left -= 1
            if self.left < 0:
                return real.execute(statement)
            raise sqlite3.OperationalError(self.message)

    now = [0.0]
    watch = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: waits.append(seconds))
    monkeypatch.setattr("nanolib.store.connection.time", watch)
    try:
        store.connection = Locked()
        assert store._patiently("SELECT 5").fetchone() == (5,) and len(waits) == 3 and min(waits) > 0
        store.connection = Locked()
        store.connection.message = "disk I/O error"
        with pytest.raises(sqlite3.OperationalError, match="disk"):
            store._patiently("SELECT 5")
        assert len(waits) == 3
        store.connection = Locked()
        store.connection.left = 1000
        watch.sleep = lambda seconds: now.__setitem__(0, now[0] + 1)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            store._patiently("SELECT 5")
        assert 5 <= now[0] <= 7
    finally:
        store.connection = real


def test_who_cannot_write_for_too_long_is_told_and_nothing_is_half_there(store):
    with sqlite3.connect(store.path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        store.connection.execute("PRAGMA busy_timeout = 20")
        with pytest.raises(
            BadInput, match=r"cannot be written \(database is locked\); free space there, or name another"
        ):
            store.add(_run("a"))
        other.execute("ROLLBACK")
    assert store.runs().empty
    store.add(_run("a"))
    assert len(store.runs()) == 1


def test_an_older_database_that_cannot_be_written_is_told(store, monkeypatch):
    store.connection.execute("PRAGMA user_version = 1")
    monkeypatch.setattr("nanolib.store.connection.writable", lambda path: False)
    with pytest.raises(
        BadInput, match=f"has schema 1, this nanolib {SCHEMA_VERSION}, and it cannot be written; copy it"
    ):
        Store(store.path)


def test_a_database_is_made_with_its_folder_and_the_default_is_in_the_output_folder(tmp_path, monkeypatch):
    with Store(tmp_path / "deep" / "folder" / "r.sqlite") as store:
        assert store.runs().empty and store.journal_mode == "wal"
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path / "out"))
    with Store() as store:
        assert store.path.parent == tmp_path / "out"


def test_what_json_has_no_form_for_is_told(store):
    with pytest.raises(TypeError, match="object has no JSON form"):
        store.add(_run("a", params={"x": object()}))
    store.add(_run("b", params={"x": np.int64(3), "y": MappingProxyType({"z": np.float32(0.5)})}))
    assert store.runs().params.iloc[0] == {"x": 3, "y": {"z": 0.5}}


def test_a_trace_of_no_run_or_no_such_table_is_told(store):
    with pytest.raises(BadInput, match="run: nowhere is not in the database; add it first"):
        store.new_trace("nowhere", "c")
    with pytest.raises(BadInput, match="table: 'runs' is no trace; use power_samples, sections, "):
        store.trace("runs")


def test_power_samples_are_those_of_the_newest_run_or_the_one_named(store):
    store.add(_run("a"))
    store.add(_run("b"))
    store.add_power_samples([{"t_s": 1.25, "watts": 3.0, "low": 2.0, "high": 4.0}])
    store.add_power_samples([SimpleNamespace(t_s=2.0000004, joules=7.0)], run_id="a", case_id="c", source="mine")
    store.commit_transaction()
    rows = store.trace("power_samples").astype(object).where(lambda frame: frame.notna(), None).to_dict("records")
    first, second = sorted(rows, key=lambda row: row["run_id"], reverse=True)
    assert (first["run_id"], first["case_id"], first["source"], first["at_us"]) == ("b", "", "power", 1_250_000)
    assert (first["watts"], first["joules"], first["low"], first["high"]) == (3.0, None, 2.0, 4.0)
    assert (second["run_id"], second["case_id"], second["source"], second["at_us"]) == ("a", "c", "mine", 2_000_000)
    assert (second["watts"], second["joules"]) == (None, 7.0)
    assert list(store.trace("power_samples", ["a"]).run_id) == ["a"] and store.trace("power_samples", []).empty
    with pytest.raises(BadInput, match="has no t_s, or neither watts nor joules"):
        store.add_power_samples([{"watts": 1.0}])
