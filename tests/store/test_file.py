"""The file as others and other versions leave it: locked, read-only, of another schema, damaged."""

import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.measurement import BadInput
from nanolib.paths import checkout
from nanolib.store import Store
from nanolib.store.connection import open_for_reading
from nanolib.store.schema import SCHEMA_VERSION
from nanolib.store.traces import TraceWriter
from tests.store.rows import make_run


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
        assert 30 <= now[0] <= 32
    finally:
        store.connection = real


LOCKED = r"is locked by another program; close that program and run again, or name another folder$"


def test_a_file_that_another_program_keeps_locked_is_told_as_locked_and_nothing_is_half_there(store):
    with Store(store.path, wait_s=0.02) as hasty, sqlite3.connect(store.path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(BadInput, match=LOCKED):
            hasty.add(make_run("a"))
        other.execute("ROLLBACK")
        assert hasty.runs().empty
        hasty.add(make_run("a"))
        assert len(hasty.runs()) == 1


@pytest.mark.parametrize("create", [True, False])
def test_a_file_that_is_locked_as_a_whole_is_told_as_locked_when_it_is_opened(tmp_path, create):
    path = tmp_path / "results.sqlite"
    Store(path).close()
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("PRAGMA journal_mode = DELETE")  # with a log beside it readers are not locked out
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(BadInput, match=LOCKED):
            Store(path, create=create, wait_s=0.02)
        other.execute("ROLLBACK")


def test_every_connection_to_a_database_waits_thirty_seconds_for_a_lock(store):
    writer = TraceWriter(store.path)
    with closing(open_for_reading(store.path)) as reader:
        for connection in (store.connection, writer._db, reader):
            assert connection.execute("PRAGMA busy_timeout").fetchone() == (30_000,)
    writer.close()


def test_a_command_that_meets_a_lock_while_it_reads_says_so_in_one_line(store, monkeypatch):
    def read(self, *_, **__):
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(Store, "runs", read)
    ended = CliRunner().invoke(main, ["runs", "--output", str(store.path.parent)])
    assert ended.exit_code == 2 and re.search(LOCKED, ended.output.strip()) and ended.output.count("\n") == 1


@pytest.mark.parametrize("version", [0, 3, 99])
def test_a_database_of_another_version_is_refused_in_one_line(store, version):
    store.connection.execute(f"PRAGMA user_version = {version}")
    told = f"{store.path} has schema {version}, this nanolib {SCHEMA_VERSION}; move it away and measure again"
    for create in (True, False):
        with pytest.raises(BadInput, match=re.escape(told)):
            Store(store.path, create=create)


def test_a_database_is_made_with_its_folder_and_the_default_is_in_the_output_folder(tmp_path, monkeypatch):
    with Store(tmp_path / "deep" / "folder" / "r.sqlite") as store:
        assert store.runs().empty and store.journal_mode == "wal"
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path / "out"))
    with Store() as store:
        assert store.path.parent == tmp_path / "out"


def test_a_label_that_is_too_long_is_told_wherever_it_comes_from(store):
    store.add(make_run("a", "x" * 200, suite="y" * 200))
    assert list(store.runs().status) == ["done"] and store.resolve("x" * 200) == ["a"]
    for name in ("label", "suite"):
        for refuse in (
            lambda name=name: store.add(make_run("b", **{name: "x" * 201})),
            lambda name=name: store.update_run("a", **{name: "x" * 201}),
        ):
            with pytest.raises(BadInput, match=rf"^run: {name} 'x+\.\.\.x+' will not do; give at most 200 characters$"):
                refuse()
    assert list(store.runs().run_id) == ["a"] and list(store.runs().label) == ["x" * 200]


def test_what_json_has_no_form_for_is_told(store):
    with pytest.raises(TypeError, match="object has no JSON form"):
        store.add(make_run("a", params={"x": object()}))
    store.add(make_run("b", params={"x": np.int64(3), "y": MappingProxyType({"z": np.float32(0.5)})}))
    assert store.runs().params.iloc[0] == {"x": 3, "y": {"z": 0.5}}


def test_a_trace_of_no_run_or_no_such_table_is_told(store):
    with pytest.raises(BadInput, match="run: nowhere is not in the database; add it first"):
        store.new_trace("nowhere", "c")
    with pytest.raises(BadInput, match="table: 'runs' is no trace; use power_samples, sections, "):
        store.trace("runs")


def test_power_samples_are_those_of_the_newest_run_or_the_one_named(store):
    store.add(make_run("a"))
    store.add(make_run("b"))
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


def test_a_missing_database_is_told_and_not_made(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        Store(tmp_path / "no.sqlite", create=False)
    assert not (tmp_path / "no.sqlite").exists()


_FILLING = """
import resource, sys
from nanolib.measurement import BadInput, Measurement
from nanolib.store import Run
from nanolib.store import Store
from tests.store.rows import MACHINE

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
            store.add(make_run(f"r{number}"))
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


def test_what_cannot_be_written_is_read(tmp_path, store, monkeypatch):
    store.add(make_run("a"))
    store.copy_to(tmp_path / "share.sqlite", ["a"])
    before = (tmp_path / "share.sqlite").read_bytes()
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "share" not in str(path) and writable(path, mode))
    with Store(tmp_path / "share.sqlite", create=False) as shared:
        assert len(shared.measurements()) == 2
        with pytest.raises(BadInput, match="cannot be written"):
            shared.add(make_run("b"))
    with Store(tmp_path / "other.sqlite") as other:
        assert other.merge(tmp_path / "share.sqlite") == 1
    assert (tmp_path / "share.sqlite").read_bytes() == before


def test_an_empty_file_is_left_empty_by_who_reads(tmp_path):
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(BadInput, match=r"empty\.sqlite is empty"):
        Store(tmp_path / "empty.sqlite", create=False)
    assert not (tmp_path / "empty.sqlite").stat().st_size


_UNPRIVILEGED = ["unshare", "--user"] if os.geteuid() == 0 else []  # nothing is read-only for root
_CAN = not _UNPRIVILEGED or (
    shutil.which("unshare") and not subprocess.run([*_UNPRIVILEGED, "true"], capture_output=True).returncode
)


def _nano(*arguments, folder):
    command = [*_UNPRIVILEGED, sys.executable, "-m", "nanolib.cli", *arguments, "--output", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(checkout())}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout(), env=environment)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(not _CAN, reason="nothing is read-only for root")
def test_what_lies_where_nothing_can_be_written_is_shown_and_each_refusal_names_it(tmp_path):
    place, theirs = tmp_path / "place", tmp_path / "theirs.sqlite"
    for path in (place / "results.sqlite", theirs):
        with Store(path) as store:
            store.add(make_run(path.stem))
    content = (place / "results.sqlite").read_bytes()
    place.chmod(0o500)
    try:
        returncode, said = _nano("runs", folder=place)
        assert returncode == 0 and "results" in said
        for arguments in (["merge", str(theirs)], ["clean", "--older-than", "0d"]):
            returncode, said = _nano(*arguments, folder=place)
            refused = (
                "cannot be written (attempt to write a readonly database); make it writable, or name another folder"
            )
            assert (returncode, said) == (2, f"nano: database: {place / 'results.sqlite'} {refused}\n")
    finally:
        place.chmod(0o700)
    assert (place / "results.sqlite").read_bytes() == content


@pytest.mark.slow
@pytest.mark.skipif(not _CAN, reason="nothing is read-only for root")
def test_a_killed_runs_database_that_was_copied_to_where_nothing_can_be_written_is_told(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    with Store(tmp_path / "results.sqlite") as store:
        store.add(make_run("killed"))
        for ending in ("", "-wal"):  # as a kill leaves it, and somebody copies it
            shutil.copy(f"{store.path}{ending}", place)
    place.chmod(0o500)
    try:
        returncode, said = _nano("runs", folder=place)
        assert returncode == 2 and said.endswith("; copy it with its -wal to where it can be written\n")
        assert len(said.splitlines()) == 1
    finally:
        place.chmod(0o700)
    returncode, said = _nano("runs", folder=place)
    assert returncode == 0 and "killed" in said  # nothing is lost


def test_of_two_databases_the_damaged_one_is_named(tmp_path):
    for name in ("ours", "theirs"):
        with Store(tmp_path / name / "results.sqlite") as store:
            for number in range(30):
                store.add(make_run(f"{name}-{number}"))
            store.connection.execute("PRAGMA journal_mode = DELETE").fetchall()
    ours, theirs = (tmp_path / name / "results.sqlite" for name in ("ours", "theirs"))
    for damaged in (ours, theirs):
        content = damaged.read_bytes()
        damaged.write_bytes(content[:8192] + b"\xff" * (len(content) - 8192))
        ended = CliRunner().invoke(main, ["merge", str(theirs), "--output", str(ours.parent)])
        assert ended.exit_code == 2 and len(ended.output.splitlines()) == 1
        assert ended.output.startswith(f"nano: database: {damaged}") and "malformed" in ended.output, ended.output
        damaged.write_bytes(content)
    ended = CliRunner().invoke(main, ["merge", str(theirs), "--output", str(ours.parent)])
    assert ended.output == f"{theirs}: 30 run(s) came in\n"


def test_what_is_deleted_while_it_is_open_takes_no_more_results(tmp_path, monkeypatch):
    place = tmp_path / "place"
    monkeypatch.chdir(tmp_path)
    with Store("place/results.sqlite") as store:
        run_id = store.add(make_run("first", rows={}))
        monkeypatch.chdir("/")
        store.write_case(run_id, "case", {}, [])  # wherever the process goes meanwhile
        place.rename(tmp_path / "moved")
        for write in (
            lambda: store.add(make_run("second")),
            lambda: store.write_case(run_id, "case", {}, []),
            lambda: store.new_trace(run_id, "case"),
        ):
            with pytest.raises(
                BadInput, match=r"results.sqlite was deleted or moved while it was open; put it back, or"
            ):
                write()
        (tmp_path / "moved").rename(place)
        store.add(make_run("third"))
    with Store(place / "results.sqlite") as store:
        assert list(store.runs().run_id) == ["first", "third"]


def test_a_trace_whose_file_cannot_be_opened_is_told_where_it_is_asked_for(store, tmp_path):
    with pytest.raises(sqlite3.OperationalError, match="unable to open database file"):
        TraceWriter(tmp_path / "nowhere" / "results.sqlite")
