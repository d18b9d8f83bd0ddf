"""Import the runs of another database, all of them or none."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from nanolib.measurement import BadInput
from nanolib.store.query import Reader
from nanolib.store.schema import TRACE_TABLES, columns_of

# The greater of two copies of a run stays: one that is done, then the fuller one.
_RANK = (
    "({run}.status = 'done',"
    " (SELECT count(*) FROM {schema}.measurements m WHERE m.run_id = {run}.run_id"
    " AND metric = 'case_duration' AND status != 'started'),"
    " (SELECT count(*) FROM {schema}.measurements m WHERE m.run_id = {run}.run_id))"
)


def check_mergeable(path: str | Path, into: Path) -> None:
    """Check that a file is a database of this version, and another one.

    Raises:
        BadInput: It is not.

    Example:
        >>> from pathlib import Path
        >>> check_mergeable("colleague.sqlite", Path("results.sqlite"))
        Traceback (most recent call last):
        nanolib.measurement.BadInput: ...colleague.sqlite...
    """
    with Reader(path, create=False) as other:
        if other.path.resolve() == into.resolve():
            raise BadInput(f"database: {path} is this database itself; name another")


def merge_database(store: Reader, path: str | Path) -> int:
    """See `Store.merge`."""
    check_mergeable(path, store.path)
    store.connection.execute("ATTACH DATABASE ? AS other", (str(path),))
    try:
        with store.transaction() as db:
            return _merge_attached(db)
    except sqlite3.DatabaseError as error:
        raise BadInput(
            f"database: {path} cannot be merged ({error}); nothing was imported; name another"
        ) from None
    finally:
        store.connection.execute("DETACH DATABASE other")


def _merge_attached(db: sqlite3.Connection) -> int:
    ours, theirs = _RANK.format(schema="main", run="r"), _RANK.format(schema="other", run="o")
    better = (
        "SELECT o.run_id FROM other.runs o LEFT JOIN main.runs r USING (run_id)"
        f" WHERE r.run_id IS NULL OR {theirs} > {ours} ORDER BY o.rowid"
    )
    taken = db.execute(better).fetchall()
    # Rows get new ids here.
    columns = ", ".join(name for name in columns_of(db, "measurements") if name != "id")
    db.execute("INSERT OR IGNORE INTO main.machines SELECT * FROM other.machines")
    for run in taken:
        place = db.execute("SELECT rowid FROM main.runs WHERE run_id = ?", run).fetchone()
        db.execute("DELETE FROM main.runs WHERE run_id = ?", run)  # with all that belongs to it
        db.execute("INSERT INTO main.runs SELECT * FROM other.runs WHERE run_id = ?", run)
        db.execute(
            f"INSERT INTO main.measurements ({columns}) SELECT {columns} FROM other.measurements"
            " WHERE run_id = ? ORDER BY rowid",
            run,
        )
        traces = "FROM other.traces WHERE run_id = ?"
        db.execute(f"INSERT INTO main.traces SELECT * {traces} ORDER BY rowid", run)
        for table in TRACE_TABLES:
            chosen = f"SELECT * FROM other.{table} WHERE trace_id IN (SELECT trace_id {traces})"
            db.execute(f"INSERT INTO main.{table} {chosen}", run)
        if place:  # a run that was here keeps its place in the order
            db.execute("UPDATE main.runs SET rowid = ? WHERE run_id = ?", (*place, *run))
    return len(taken)
