"""A database for sharing: chosen runs, each row redacted before it is written."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from nanolib.measurement import BadInput
from nanolib.store.connection import Connection, is_locked, locked
from nanolib.store.schema import LISTED, SCHEMA, marks
from nanolib.store.sharing import Redaction, new_file

# of an exported table, the rows that belong to the runs chosen, by the first of these columns that it has
_CHOSEN = {
    "run_id": f"run_id IN {LISTED}",
    "trace_id": f"trace_id IN (SELECT trace_id FROM traces WHERE run_id IN {LISTED})",
    "machine_id": f"machine_id IN (SELECT machine_id FROM runs WHERE run_id IN {LISTED})",
}


def write_copy(database: Connection, path: Path, run_ids: Iterable[str]) -> None:
    """Write these runs to a new database for sharing; it names no process, person, machine or folder.

    Each row is redacted before it is written: what is killed half-way leaves nothing private on the disk either.

    Raises:
        BadInput: The file is there already or cannot be written, or this one cannot be read.
    """
    ids = json.dumps(list(run_ids))
    with new_file(path) as file, closing(sqlite3.connect(file, isolation_level=None)) as copy:
        copy.execute("PRAGMA auto_vacuum = INCREMENTAL")
        # what fails is deleted, and what is whole is synced once
        copy.execute("PRAGMA journal_mode = OFF").fetchall()
        copy.execute("PRAGMA synchronous = OFF")
        copy.executescript(";".join(SCHEMA))
        copy.execute("BEGIN")
        database.connection.execute("BEGIN")  # one moment's view
        try:
            redaction = Redaction(row["params"] for row in _rows_of(database, "runs", ["params"], "run_id", ids))
            for (table,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                columns = {row[1]: row[2] for row in copy.execute(f"PRAGMA table_info({table})")}
                key = next(name for name in _CHOSEN if name in columns)
                rows = _rows_of(database, table, columns, key, ids)
                told = redaction.rows(rows) if "TEXT" in columns.values() else rows
                copy.executemany(
                    f"INSERT INTO {table} VALUES ({marks(len(columns))})", (tuple(row.values()) for row in told)
                )
        finally:
            database.connection.execute("ROLLBACK")
        copy.execute("COMMIT")


def _rows_of(database: Connection, table: str, columns: Iterable[str], key: str, ids: str) -> Iterator[dict[str, Any]]:
    """Rows of a table that belong to the runs of a JSON list, in the order in which they came."""
    names = list(columns)
    order = "trace_id, number" if "number" in names else "rowid"
    query = f"SELECT {', '.join(names)} FROM {table} WHERE {_CHOSEN[key]} ORDER BY {order}"
    try:
        for row in database.connection.execute(query, [ids]):
            yield dict(zip(names, row, strict=True))
    except sqlite3.DatabaseError as error:
        if is_locked(error):
            raise BadInput(locked(database.path)) from None
        raise BadInput(f"database: {database.path} cannot be read ({error}); name another, or copy it again") from None
