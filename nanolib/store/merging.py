"""Bring what an attached database holds into this one: whichever is merged into which, and how often, the result is the same."""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
from collections.abc import Collection, Iterable
from typing import Any

from nanolib.measurement import RunStatus, Status
from nanolib.store.schema import TRACE_TABLES

_Row = dict[str, Any]
_RANKED = ("case_id", "metric", "status")


def merge_all(db: sqlite3.Connection, run_ids: Collection[str] | None = None) -> int:
    """Bring in the runs of the attached database, or those named of them; how many were new or had something new."""
    runs = [run for run in _rows(db, "other.runs") if run_ids is None or run["run_id"] in run_ids]
    for machine_id in sorted({run["machine_id"] for run in runs}):
        for machine in _rows(db, "other.machines", "machine_id = ?", machine_id):
            _merge_machine(db, machine)
    return sum(_merge_run(db, run) for run in runs)  # in the order in which they came there


def _rows(db: sqlite3.Connection, table: str, condition: str = "1", *values: Any) -> list[_Row]:
    cursor = db.execute(f"SELECT * FROM {table} WHERE {condition}", values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _merge_run(db: sqlite3.Connection, theirs: _Row) -> bool:
    """Whether it was new or had something new."""
    run_id = theirs["run_id"]
    ours = next(iter(_rows(db, "main.runs", "run_id = ?", run_id)), None)
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
    for row in rows:
        marks = ", ".join("?" * len(row))
        db.execute(f"INSERT OR REPLACE INTO main.{table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))


def _merge_rows(db: sqlite3.Connection, run: _Row, which: str = "1", *values: Any) -> None:
    """Measurements of a run of the attached database, as it has them in order."""
    names = ", ".join(row[1] for row in db.execute("PRAGMA main.table_info(measurements)") if row[1] != "id")
    db.execute(
        f"INSERT INTO main.measurements ({names}) SELECT {names} FROM other.measurements"
        f" WHERE run_id = ? AND {which} ORDER BY id",
        (run["run_id"], *values),
    )


def _merge_machine(db: sqlite3.Connection, theirs: _Row) -> None:
    """Of a machine that both databases know, one description, whichever is merged into which: that of the later torch."""
    names = sorted(theirs, key=lambda name: name != "torch")
    ours = next(iter(_rows(db, "main.machines", "machine_id = ?", theirs["machine_id"])), None)
    if ours is not None:
        there, here = ([str(machine[name]) for name in names] for machine in (theirs, ours))
        if there <= here:
            return
    _insert(db, "machines", [theirs])


def _merge_traces(db: sqlite3.Connection, run: _Row, which: str = "1", *values: Any) -> None:
    """Bring in the traces of one run from the attached database; they get numbers of this one."""
    for trace in _rows(db, "other.traces", f"run_id = ? AND {which}", run["run_id"], *values):
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
