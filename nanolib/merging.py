"""Bring what an attached database holds into this one: whichever is merged into which, and how often, the result is the same."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

from nanolib.measurement import RunStatus, Status
from nanolib.schema import TRACE_TABLES


def merge_runs(db: sqlite3.Connection, run_ids: Collection[str] | None = None) -> int:
    """Bring in the runs of the attached database, or those named of them; how many were new or had something new."""
    query = "SELECT run_id, ours.status, theirs.status FROM other.runs theirs LEFT JOIN main.runs ours USING (run_id) ORDER BY 1"
    count = 0
    for run_id, ours, theirs in db.execute(query).fetchall():
        if ours == RunStatus.DONE or (run_ids is not None and run_id not in run_ids):
            continue
        if ours is None or theirs == RunStatus.DONE:
            db.execute("DELETE FROM main.runs WHERE run_id = ?", (run_id,))
            db.execute("INSERT INTO main.runs SELECT * FROM other.runs WHERE run_id = ?", (run_id,))
            _merge_rows(db, run_id, "1")
            _merge_traces(db, run_id)
            count += 1
        else:
            count += _merge_unfinished(db, run_id)
    return count


def _merge_unfinished(db: sqlite3.Connection, run_id: str) -> bool:
    """Of a run that neither finished: the cases that have ended there and not here, and the fate of whichever got further."""
    ended = f"SELECT case_id FROM {{}}.measurements WHERE run_id = ? AND metric = 'case_time' AND status != '{Status.STARTED}'"
    new = db.execute(f"{ended.format('other')} EXCEPT {ended.format('main')}", (run_id, run_id)).fetchall()
    for (case_id,) in new:
        db.execute("DELETE FROM main.measurements WHERE run_id = ? AND case_id = ?", (run_id, case_id))
        db.execute("DELETE FROM main.traces WHERE run_id = ? AND case_id = ?", (run_id, case_id))
        _merge_rows(db, run_id, "case_id = ?", case_id)
        _merge_traces(db, run_id, "case_id = ?", case_id)
    fate = "SELECT coalesce(duration_s, 0), duration_s, status, message FROM {}.runs WHERE run_id = ?"
    theirs, ours = (db.execute(fate.format(schema), (run_id,)).fetchone() for schema in ("other", "main"))
    further = tuple(map(str, theirs[1:])) if theirs[0] == ours[0] else ()
    if theirs[0] > ours[0] or further > tuple(map(str, ours[1:])):
        db.execute(
            "UPDATE main.runs SET duration_s = ?, status = ?, message = ? WHERE run_id = ?", (*theirs[1:], run_id)
        )
    return bool(new)


def _merge_rows(db: sqlite3.Connection, run_id: str, which: str, *values: str) -> None:
    """Measurements of a run of the attached database, as it has them in order."""
    names = ", ".join(row[1] for row in db.execute("PRAGMA main.table_info(measurements)") if row[1] != "id")
    db.execute(
        f"INSERT INTO main.measurements ({names}) SELECT {names} FROM other.measurements WHERE run_id = ? AND {which} ORDER BY id",
        (run_id, *values),
    )


def merge_machines(db: sqlite3.Connection) -> None:
    """Of a machine that both databases know, one description, whichever is merged into which: that of the later torch."""
    names = [row[1] for row in db.execute("PRAGMA main.table_info(machines)")]
    names.sort(key=lambda name: name != "torch")
    columns, marks = ", ".join(names), ", ".join("?" * len(names))
    for theirs in db.execute(f"SELECT {columns} FROM other.machines").fetchall():
        machine_id = theirs[names.index("machine_id")]
        ours = db.execute(f"SELECT {columns} FROM main.machines WHERE machine_id = ?", (machine_id,)).fetchone()
        if ours is None or tuple(map(str, theirs)) > tuple(map(str, ours)):
            db.execute(f"INSERT OR REPLACE INTO main.machines ({columns}) VALUES ({marks})", theirs)


def _merge_traces(db: sqlite3.Connection, run_id: str, which: str = "1", *values: str) -> None:
    """Bring in the traces of one run from the attached database; they get numbers of this one."""
    query = f"SELECT trace_id, case_id, names FROM other.traces WHERE run_id = ? AND {which}"
    theirs = db.execute(query, (run_id, *values)).fetchall()
    for trace_id, *rest in theirs:
        ours = db.execute(
            "INSERT INTO main.traces (run_id, case_id, names) VALUES (?, ?, ?)", (run_id, *rest)
        ).lastrowid
        for table, columns in TRACE_TABLES.items():
            names = ", ".join(("number", *columns))
            db.execute(
                f"INSERT INTO main.{table} (trace_id, {names}) SELECT ?, {names} FROM other.{table} WHERE trace_id = ?",
                (ours, trace_id),
            )
