"""Create, open and merge database files, and write transactions."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from nanolib.measurement import BadInput
from nanolib.paths import database_path, make_folder, put_in_place
from nanolib.store.schema import (
    APPLICATION_ID,
    SCHEMA,
    SCHEMA_VERSION,
    TABLES_OF_CASES,
    columns_of,
)

WAIT_S = 30.0  # Longest wait of a write while another program locks the file, s.
# If two databases contain the same run, a merge keeps the copy with the greater rank. Copies are
# ranked first by status, then by finished cases, and then by rows.
_RANK = (
    "({run}.status = 'done',"
    " (SELECT count(*) FROM {schema}.measurements m WHERE m.run_id = {run}.run_id"
    " AND metric = 'case_duration' AND status != 'started'),"
    " (SELECT count(*) FROM {schema}.measurements m WHERE m.run_id = {run}.run_id))"
)


class Connection:
    """An open database file, the base class of `Store`."""

    def __init__(self, path: str | Path | None = None, *, create: bool = True) -> None:
        self.path = Path(path) if path is not None else database_path()
        if not self.path.exists():
            if not create:
                raise BadInput(
                    f"database: {self.path} does not exist; "
                    "run `nano run quick` first or name another database"
                )
            make_folder(self.path.parent)
            make_database(self.path)
        if self.path.is_dir():
            raise BadInput(f"database: {self.path} is a folder; name a file")
        self.connection = _connected(self.path)
        try:
            check_version(self.connection, self.path)
            self.connection.execute("PRAGMA foreign_keys = ON")
            # A network file system may have refused WAL. Any other journal mode needs full syncs to
            # survive a power failure.
            journal_mode = value_of(self.connection.execute("PRAGMA journal_mode"))
            synchronous = "NORMAL" if journal_mode == "wal" else "FULL"
            self.connection.execute(f"PRAGMA synchronous = {synchronous}")
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise BadInput(unusable(self.path, error)) from None
        except BadInput:
            self.connection.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all changes within the context together. After an error, undo all of them.

        A transaction within another transaction is part of the outer transaction.

        Raises:
            BadInput: The file cannot be written, because the disk is full, the file is read-only,
                or another program keeps the file locked.
        """
        if self.connection.in_transaction:
            yield self.connection
            return
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:  # SQLite has already rolled back after some errors.
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise BadInput(unusable(self.path, error)) from error
            raise

    def merge(self, path: str | Path) -> int:
        """Import the runs of another database. A repeated import of the same file has no effect.

        If both databases contain a run, nanolib keeps the copy with the status `done`. If both
        copies or no copies are `done`, nanolib keeps the copy with more finished cases.

        Args:
            path: Path of the other database.

        Returns:
            The number of imported runs.

        Raises:
            BadInput: The other database is missing, is this database, or contains an invalid row.
                After an error, this database is unchanged.
        """
        check_mergeable(path, self.path)
        self.connection.execute("ATTACH DATABASE ? AS other", (_uri(Path(path)),))
        try:
            with self.transaction() as db:
                return _merge_attached(db)
        except sqlite3.DatabaseError as error:
            if value_of(self.connection.execute("PRAGMA main.quick_check(1)")) != "ok":
                raise BadInput(unusable(self.path, error)) from None
            raise BadInput(
                f"database: {path} cannot be merged ({error}); nothing changed; name another file"
            ) from None
        finally:
            self.connection.execute("DETACH DATABASE other")

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        # The error of pandas contains the error of SQLite.
        found = error if isinstance(error, sqlite3.Error) else getattr(error, "__cause__", None)
        if isinstance(found, sqlite3.DatabaseError) and not isinstance(error, BadInput):
            raise BadInput(unusable(self.path, found)) from error


def _connected(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(_uri(path), timeout=WAIT_S, isolation_level=None, uri=True)


def _uri(path: Path) -> str:
    """Return the URI of a file. In a read-only folder, SQLite cannot create the files for WAL."""
    uri = path.absolute().as_uri()
    if os.access(path.parent, os.W_OK):
        return uri
    has_wal = path.with_name(f"{path.name}-wal").exists()
    return f"{uri}?mode=ro" if has_wal else f"{uri}?immutable=1"


def make_database(path: Path) -> None:
    """Create an empty database, unless another process creates the same file at the same time.

    Raises:
        BadInput: The file cannot be written.
    """
    try:
        with put_in_place(path) as file:
            write_schema(file, "WAL")
    except FileExistsError:
        return
    except (OSError, sqlite3.Error) as error:
        raise BadInput(unusable(path, error)) from None


def write_schema(file: Path, journal_mode: str) -> None:
    """Create the tables in a new file."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        # SQLite ignores this pragma after the first table.
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        db.execute(f"PRAGMA journal_mode = {journal_mode}").fetchall()
        db.executescript(";".join(("BEGIN", *SCHEMA, "COMMIT")))


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Check that an open file is a nanolib database with the current schema.

    Raises:
        BadInput: Another program wrote the file, or the file has another schema.
    """
    application, version = (
        value_of(connection.execute(f"PRAGMA {name}"))
        for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID:
        raise BadInput(f"database: {path} is not a nanolib database; name another file")
    if version != SCHEMA_VERSION:
        raise BadInput(
            f"database: {path} has schema {version}, but nanolib needs schema {SCHEMA_VERSION}; "
            "move the file away and measure again"
        )


def unusable(path: Path, error: Exception) -> str:
    """Return an error message that says why a file cannot be used, and what to do."""
    problem = f"cannot be opened ({error}); name another file, or move the file away"
    if "is locked" in str(error):
        problem = "is locked by another program; close that program, or name another file"
    elif isinstance(error, sqlite3.OperationalError | OSError):
        problem = f"cannot be used ({error}); free space, or name a folder that you can write to"
    return f"database: {path} {problem}"


def value_of(rows: sqlite3.Cursor) -> Any:
    """Return the single value that a query has selected."""
    ((value,),) = rows
    return value


def days_ago(db: sqlite3.Connection, days: float) -> str:
    """Return the time that was some days ago, in the format of the start of a run.

    The result is an empty string for a time before SQLite's calendar.
    """
    ago = ("%Y-%m-%dT%H:%M:%f", f"-{days} days")
    return value_of(db.execute("SELECT strftime(?, 'now', ?)", ago)) or ""


def check_mergeable(path: str | Path, into: Path) -> None:
    """Check that a file is a nanolib database, and that it is not the receiving database.

    Args:
        path: Path of the database to merge.
        into: Path of the database that would receive the runs.

    Raises:
        BadInput: The file is missing, is not a nanolib database, or is the same database.

    Example:
        >>> from pathlib import Path
        >>> check_mergeable("colleague.sqlite", Path("results.sqlite"))
        Traceback (most recent call last):
        nanolib.measurement.BadInput: ...colleague.sqlite...
    """
    with Connection(path, create=False) as other:
        if other.path.resolve() == into.resolve():
            raise BadInput(f"database: {path} is this database itself; name another file")


def _merge_attached(db: sqlite3.Connection) -> int:
    """Import the runs of the attached database, and return their number."""
    ours, theirs = _RANK.format(schema="main", run="r"), _RANK.format(schema="other", run="o")
    better = (
        "SELECT o.run_id FROM other.runs o LEFT JOIN main.runs r USING (run_id)"
        f" WHERE r.run_id IS NULL OR {theirs} > {ours} ORDER BY o.rowid"
    )
    taken = db.execute(better).fetchall()
    db.execute("INSERT OR IGNORE INTO main.machines SELECT * FROM other.machines")
    for run in taken:
        place = db.execute("SELECT rowid FROM main.runs WHERE run_id = ?", run).fetchone()
        db.execute("DELETE FROM main.runs WHERE run_id = ?", run)  # SQLite also deletes its rows.
        db.execute("INSERT INTO main.runs SELECT * FROM other.runs WHERE run_id = ?", run)
        for table in TABLES_OF_CASES:
            columns = ", ".join(columns_of(db, table))
            chosen = f"SELECT {columns} FROM other.{table} WHERE run_id = ? ORDER BY id"
            db.execute(f"INSERT INTO main.{table} ({columns}) {chosen}", run)
        if place:  # A replaced run keeps its place in the order.
            db.execute("UPDATE main.runs SET rowid = ? WHERE run_id = ?", (*place, *run))
    return len(taken)
