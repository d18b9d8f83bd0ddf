"""The database file is made and opened, refuses invalid rows, and survives other programs."""

import sqlite3
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from nanolib.measurement import BadInput
from nanolib.paths import checkout
from nanolib.store import Store
from nanolib.store.connection import WAIT_S
from nanolib.store.schema import SCHEMA_VERSION
from tests.processes import ended, invoked
from tests.store.rows import make_run


def test_it_is_made_with_its_folder_and_the_pragmas_are_in_force(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path / "deep" / "out"))
    with Store() as store:
        assert store.path.parent == tmp_path / "deep" / "out" and store.runs().empty
        for name, value in {
            "journal_mode": "wal",
            "foreign_keys": 1,
            "auto_vacuum": 2,
            "synchronous": 1,
            "busy_timeout": 1000 * WAIT_S,
            "user_version": SCHEMA_VERSION,
        }.items():
            assert store.connection.execute(f"PRAGMA {name}").fetchone() == (value,)


def test_a_folder_that_cannot_be_written_is_read_without_a_file_beside(tmp_path, monkeypatch):
    path = tmp_path / "50% of a?b" / "results.sqlite"
    with Store(path) as store:
        store.add(make_run())
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with Store(path, create=False) as store:
        assert len(store.runs()) == 1
        assert list(path.parent.iterdir()) == [path]


def test_several_that_make_the_same_database_at_once_all_get_it(tmp_path):
    def make(path):
        barrier.wait()
        Store(path).close()

    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, [tmp_path / f"{number // 4}.sqlite" for number in range(100)]))
    assert len(list(tmp_path.iterdir())) == 25


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ("measurements", "status = 'fine'"),
        ("measurements", "estimate = 9e999"),
        ("measurements", "samples = x'00'"),
        ("measurements", "factors = '{'"),
        ("measurements", "confidence = 2"),
        ("measurements", "run_id = 'nowhere'"),
        ("runs", "label = printf('%201d', 1)"),
        ("runs", "machine_id = 'nowhere'"),
    ],
)
def test_the_engine_refuses_what_nanolib_would_not_write(store, table, change):
    store.add(make_run())
    with pytest.raises(sqlite3.IntegrityError), store.transaction() as db:
        db.execute(f"UPDATE {table} SET {change}")


def test_a_file_that_another_program_locks_is_one_line_and_nothing_is_half_there(store):
    store.connection.execute("PRAGMA busy_timeout = 20")
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BadInput, match=r"cannot be used \(database is locked\); close") as e:
            store.add(make_run("a"))
    assert len(e.value.lines) == 1 and store.runs().empty
    store.add(make_run("a"))


_FILLING = """
import resource, sys
from nanolib.measurement import BadInput, Measurement
from nanolib.store import Run, Store
from tests.store.rows import MACHINE

with Store(sys.argv[1]) as store:
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    try:
        for number in range(1000):
            big = Measurement("latency", 1.0, samples=tuple(map(float, range(500))))
            store.add(Run("attention", MACHINE, rows={"case": ({"n": number}, [big])}))
            print(number, flush=True)
    except BadInput as error:
        print(error.lines[0])
"""


def test_a_full_disk_is_one_line_and_what_was_there_stays(tmp_path):
    path = tmp_path / "results.sqlite"
    done = ended(sys.executable, "-c", _FILLING, str(path), cwd=checkout())
    *stored, said = done.stdout.splitlines()
    assert "cannot be used (d" in said and "free space" in said
    with Store(path, create=False) as store:
        assert store.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert len(store.runs()) == len(stored) == len(store.measurements()) > 5


def test_of_two_files_the_damaged_one_is_named_in_one_line(tmp_path):
    paths = ours, theirs = [tmp_path / name / "results.sqlite" for name in ("ours", "theirs")]
    for path in paths:
        with Store(path) as store:
            store.add(make_run(path.parent.name))

    def nano(*arguments):
        done = invoked(*arguments, "--output", ours.parent)
        assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output
        return done.output

    whole = theirs.read_bytes()
    # the tables are damaged, and the schema around them is not
    tables = slice(2 * 4096, 19 * 4096)
    theirs.write_bytes(whole[: tables.start].ljust(tables.stop, b"x") + whole[tables.stop :])
    assert f"{theirs} cannot be used (" in nano("compare", theirs, "latest")
    assert f"{theirs} cannot be merged into {ours} (" in nano("merge", theirs)
    ours.write_bytes(theirs.read_bytes())
    theirs.write_bytes(whole)
    target = tmp_path / "x.json"
    for command in (("report",), ("runs",), ("export", target), ("compare", theirs, "latest")):
        assert f"{ours} cannot be used (" in nano(*command)
    assert not target.exists()
