"""Bring what an attached database holds into this one: whichever is merged into which, and how often, the result is the same.

Nothing of the other database is believed: it must have the tables of this version and nothing else, and each row that comes in is
one that this program writes.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from nanolib.measurement import RUN_ID, BadInput, RunStatus, Status, shown
from nanolib.store.checks import MOST_ROWS, MOST_SAMPLES, Broken, check_moment, read_row, trace_condition, unsound
from nanolib.store.schema import MIGRATIONS, NAMED, REAL, SCHEMA_VERSION, TRACE_TABLES

_Row = dict[str, Any]
_RANKED = ("case_id", "metric", "status")
_STEPS, _MOST_STEPS = 100_000, 10**8  # between two looks at how far reading has come; for a file without a byte
_THEIRS = {
    "SQLITE_CORRUPT",
    "SQLITE_NOTADB",
    "SQLITE_INTERRUPT",
    "SQLITE_CONSTRAINT",
    "SQLITE_MISMATCH",
    "SQLITE_TOOBIG",
}
_THEIRS |= {"SQLITE_ERROR", "SQLITE_FORMAT"}


def check_objects(db: sqlite3.Connection, schema: str, version: int) -> None:
    """Whether a database has the tables and indexes of its version and nothing else: no view, trigger or computed column.

    Raises:
        BadInput: It has not; says which.
    """
    found, expected = _objects(db, schema), _expected(version)
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key) != expected.get(key):
            kind, name = key
            what = (
                "is not in it"
                if key not in found
                else "is not one of its own"
                if key not in expected
                else "is not as made"
            )
            raise BadInput(f"{kind} {shown(name)} {what}; only what nanolib itself made can be merged")


def _objects(db: sqlite3.Connection, schema: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Type and name → table and statement; the planner's own statistics are left out."""
    rows = db.execute(
        f"SELECT type, name, tbl_name, sql FROM {schema}.sqlite_master WHERE name NOT LIKE 'sqlite^_stat%' ESCAPE '^'"
    )
    return {(str(kind), str(name)): (str(table), " ".join(str(sql).split())) for kind, name, table, sql in rows}


@functools.cache
def _expected(version: int) -> dict[tuple[str, str], tuple[str, str]]:
    db = sqlite3.connect(":memory:")
    try:
        for migration in MIGRATIONS[:version]:
            db.executescript(migration)
        return _objects(db, "main")
    finally:
        db.close()


@contextmanager
def guarded(db: sqlite3.Connection, size: int) -> Iterator[None]:
    """While it lasts text comes whatever its bytes are, nothing in it is too long, and queries end: they read so much at most.

    Args:
        db: To which the other database is attached.
        size: Of its file, bytes.

    Raises:
        BadInput: The other database cannot be read.
    """
    left = (10 * size + _MOST_STEPS) // _STEPS

    def too_long() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    before = db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)
    db.set_progress_handler(too_long, _STEPS)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 9 * MOST_SAMPLES)
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
        if not any(name.startswith(theirs) for theirs in _THEIRS):
            raise
        db.set_progress_handler(None, 0)
        if name.startswith("SQLITE_CORRUPT") and not _is_sound(db):
            raise
        raise BadInput(f"it cannot be read ({error})") from error
    finally:
        db.set_progress_handler(None, 0)
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, before)


def _is_sound(db: sqlite3.Connection) -> bool:
    """Whether our own database is; both are read at once."""
    try:
        return db.execute("PRAGMA main.quick_check(1)").fetchone() == ("ok",)
    except sqlite3.DatabaseError:
        return False


def merge_all(db: sqlite3.Connection, run_ids: Collection[str] | None = None) -> int:
    """Bring in the runs of the attached database, or those named of them; how many were new or had something new.

    Raises:
        BadInput: Something in it is not what this program writes; says which run and row.
    """
    check_objects(db, "other", SCHEMA_VERSION)
    runs = [run for run in _rows(db, "other.runs") if run_ids is None or run["run_id"] in run_ids]
    machines = {machine["machine_id"]: machine for machine in _rows(db, "other.machines")}
    for run in runs:
        _check(run, "runs", run)
        try:
            check_moment(run["started"])
        except Broken as error:
            raise _broken(run, "runs", f"started: {error}") from None
        if run["machine_id"] not in machines:
            raise _broken(run, "runs", f"machine_id: {shown(run['machine_id'])} is no machine of this database")
    for machine_id in sorted({run["machine_id"] for run in runs}):
        _check(None, "machines", machines[machine_id])
        _merge_machine(db, machines[machine_id])
    return sum(_merge_run(db, run) for run in runs)  # in the order in which they came there


def _rows(db: sqlite3.Connection, table: str, condition: str = "1", *values: Any) -> list[_Row]:
    cursor = db.execute(f"SELECT * FROM {table} WHERE {condition}", values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _check(run: _Row | None, table: str, row: _Row) -> list[Any]:
    values, wrong = read_row(table, list(row), list(row.values()))
    if wrong:
        raise _broken(run, table, wrong, row)
    return values


def _broken(run: _Row | None, table: str, wrong: str, row: Mapping[str, Any] | None = None) -> BadInput:
    of = f"run {_short(run['run_id'])}, " if run else ""
    names = {"machines": ("machine_id",), "runs": ()}.get(table, ("id", "case_id", "metric", "scope"))
    which = " ".join(_short(row[name]) for name in names if row and row.get(name) not in (None, ""))
    return BadInput(f"{of}{table}{' ' + which if which else ''}: {wrong}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value.isprintable() and value.isascii() else shown(value)
    return text[:8] if RUN_ID.fullmatch(text) else text[:40]


def _merge_run(db: sqlite3.Connection, theirs: _Row) -> bool:
    """Whether it was new or had something new."""
    run_id = theirs["run_id"]
    ours = next(iter(_rows(db, "main.runs", "run_id = ?", run_id)), None)
    if ours is not None and read_row("runs", list(ours), list(ours.values()))[1]:
        ours = None  # what is broken here is replaced
    if ours is not None:
        done = [run["status"] == RunStatus.DONE for run in (ours, theirs)]
        if not any(done):
            return _merge_unfinished(db, ours, theirs)
        if done == [True, False] or theirs == ours:
            return False
        if all(done) and _rank(db, "other", theirs) <= _rank(db, "main", ours):
            return False
    place = db.execute("SELECT rowid FROM main.runs WHERE run_id = ?", (run_id,)).fetchone() or (None,)
    for table in ("traces", "runs"):
        db.execute(f"DELETE FROM main.{table} WHERE run_id = ?", (run_id,))
    _insert(db, "runs", [{"rowid": place[0]} | theirs])  # one that was here stays where it is among the others
    _merge_rows(db, theirs)
    _merge_traces(db, theirs)
    return True


def _merge_unfinished(db: sqlite3.Connection, ours: _Row, theirs: _Row) -> bool:
    """Of a run that neither finished: of each case the one of higher rank, and the fate of whichever got further."""
    run_id = theirs["run_id"]
    here, there = (_ranks(db, schema, run_id) for schema in ("main", "other"))
    new = [case_id for case_id, rank in there.items() if rank > here.get(case_id, ())]
    for case_id in new:
        db.execute("DELETE FROM main.measurements WHERE run_id = ? AND case_id = ?", (run_id, case_id))
        db.execute("DELETE FROM main.traces WHERE run_id = ? AND case_id = ?", (run_id, case_id))
        _merge_rows(db, theirs, "case_id = ?", case_id)
        _merge_traces(db, theirs, "case_id = ?", case_id)
    names = ("duration_s", "status", "message", "process", "launch")
    fates = [((run["duration_s"] or 0), *(str(run[name]) for name in names)) for run in (ours, theirs)]
    if fates[1] > fates[0]:
        fate = [theirs[name] for name in names]
        db.execute(f"UPDATE main.runs SET {' = ?, '.join(names)} = ? WHERE run_id = ?", (*fate, run_id))
    return bool(new)


def _ranks(db: sqlite3.Connection, schema: str, run_id: str) -> dict[str, tuple[bool, int, str]]:
    """What decides between two copies of each case of a run: whether it ended, how much its rows tell, and their digest."""
    query = f"SELECT * FROM {schema}.measurements WHERE run_id = ? ORDER BY case_id, metric, scope, method"
    cursor = db.execute(query, (run_id,))
    case_id, metric, status = ([column[0] for column in cursor.description].index(n) for n in _RANKED)
    ranks = {}
    for case, rows in itertools.groupby(cursor, key=lambda row: row[case_id]):
        told = [(row[metric] == "case_time" and row[status] != Status.STARTED, repr(row[1:])) for row in rows]
        text = "".join(one for _, one in told)
        ranks[case] = (any(ended for ended, _ in told), len(text), hashlib.sha256(text.encode()).hexdigest())
    return ranks


def _rank(db: sqlite3.Connection, schema: str, run: _Row) -> tuple[Any, ...]:
    """What decides between two copies of a run that are both done: the longer one, that which tells more, then the rows."""
    ranks, text = sorted(_ranks(db, schema, run["run_id"]).values()), repr(sorted(run.items()))
    return run["duration_s"] or 0, len(text) + sum(length for _, length, _ in ranks), text, ranks


def _insert(db: sqlite3.Connection, table: str, rows: Iterable[_Row]) -> None:
    """Rows as they were looked at, whatever another query would give."""
    for row in rows:
        marks = ", ".join("?" * len(row))
        db.execute(f"INSERT OR REPLACE INTO main.{table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))


def _merge_rows(db: sqlite3.Connection, run: _Row, which: str = "1", *values: Any) -> None:
    """Measurements of a run of the attached database, as it has them in order."""
    condition = f"run_id = ? AND {which}"
    ((count,),) = db.execute(f"SELECT count(*) FROM other.measurements WHERE {condition}", (run["run_id"], *values))
    if count > MOST_ROWS:
        raise _broken(run, "measurements", f"{count:,} rows, of at most {MOST_ROWS:,}")
    cursor = db.execute(f"SELECT * FROM other.measurements WHERE {condition} ORDER BY id", (run["run_id"], *values))
    names = [column[0] for column in cursor.description]
    of_run = {name: run[name] for name in ("experiment", "suite", "label", "machine_id")}
    places = [(names.index(name), value, name) for name, value in of_run.items()]

    def checked() -> Iterator[tuple[Any, ...]]:
        sound: set[Any] = set()
        for row in cursor:
            wrong = unsound("measurements", names, row, sound)
            for place, value, name in places:
                if not wrong and row[place] != value:
                    wrong = f"{name}: {shown(row[place])} is not that of its run"
            if wrong:
                raise _broken(run, "measurements", wrong, dict(zip(names, row, strict=True)))
            yield row[1:]

    marks = ", ".join("?" * (len(names) - 1))
    with closing(cursor):  # one that is left half-way would keep the other database
        db.executemany(f"INSERT INTO main.measurements ({', '.join(names[1:])}) VALUES ({marks})", checked())


def _merge_machine(db: sqlite3.Connection, theirs: _Row) -> None:
    """Of a machine that both databases know, one description, whichever is merged into which: that of the later torch."""
    names = sorted(theirs, key=lambda name: name != "torch")
    ours = next(iter(_rows(db, "main.machines", "machine_id = ?", theirs["machine_id"])), None)
    if ours is not None and not read_row("machines", list(ours), list(ours.values()))[1]:
        there, here = ([str(machine[name]) for name in names] for machine in (theirs, ours))
        if there <= here:
            return
    _insert(db, "machines", [theirs])


def _merge_traces(db: sqlite3.Connection, run: _Row, which: str = "1", *values: Any) -> None:
    """Bring in the traces of one run from the attached database; they get numbers of this one."""
    for trace in _rows(db, "other.traces", f"run_id = ? AND {which}", run["run_id"], *values):
        names = _check(run, "traces", trace)[-1]
        ours = db.execute(
            "INSERT INTO main.traces (run_id, case_id, names) VALUES (?, ?, ?)",
            (trace["run_id"], trace["case_id"], trace["names"]),
        ).lastrowid
        for table, columns in TRACE_TABLES.items():
            listed = ", ".join(("number", *columns))
            db.execute(
                f"INSERT INTO main.{table} (trace_id, {listed}) SELECT ?, {listed} FROM other.{table} WHERE trace_id = ?",
                (ours, trace["trace_id"]),
            )
            counts = [len(names)] * len(set(NAMED) & set(columns))
            sound = trace_condition(table, columns, NAMED, REAL)
            query = (
                f"SELECT number, {', '.join(columns)} FROM main.{table} WHERE trace_id = ? AND NOT ({sound}) LIMIT 1"
            )
            for row in db.execute(query, (ours, *counts)).fetchall():
                raise _broken(
                    run, table, f"{shown(row)} holds what is no number or no name of its trace", {"id": row[0]}
                )
