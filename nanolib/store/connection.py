"""Create, open and merge database files, write transactions, and name the process of a run."""

import functools
import hashlib
import os
import platform
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil

from nanolib.measurement import BadInput
from nanolib.paths import DATABASE, make_folder, output_folder
from nanolib.store.schema import SCHEMA, SCHEMA_VERSION, TABLES_OF_CASES, columns_of

WAIT_S = 30.0  # Longest wait of a write while another program locks the file, s.
# If two databases contain the same run, a merge keeps the copy with the greater rank.
_RANK = (
    "({run}.status = 'done', (SELECT count(*) FROM {schema}.measurements m"
    " WHERE m.run_id = {run}.run_id AND metric = 'case_duration' AND m.status != 'started'))"
)


class Connection:
    """An open database file, the base class of `Store`."""

    def __init__(self, path: str | Path | None = None, *, create: bool = True):
        self.path = Path(path) if path is not None else output_folder() / DATABASE
        if create:
            make_folder(self.path.parent)
        elif not self.path.exists():
            raise BadInput(
                f"database: {self.path} does not exist; "
                "run `nano run quick` first or name another database"
            )
        # SQLite writes next to the file, even to read, unless it may assume an immutable file.
        immutable = not create and not os.access(self.path.parent, os.W_OK)
        source = f"{self.path.resolve().as_uri()}?immutable=1" if immutable else self.path
        try:
            self.connection = sqlite3.connect(
                source, timeout=WAIT_S, isolation_level=None, uri=immutable
            )
            if create:
                make_tables(self.connection, "WAL")
            (version,) = self.connection.execute("PRAGMA user_version").fetchone()
            self.connection.execute("PRAGMA foreign_keys = ON")
            # A network file system may have refused WAL. Any other journal mode needs full syncs to
            # survive a power failure.
            if self.connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
                self.connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            raise BadInput(unusable(self.path, error)) from None
        if version != SCHEMA_VERSION:
            raise BadInput(
                f"database: {self.path} has schema {version}, but nanolib needs schema "
                f"{SCHEMA_VERSION}; name another file, or move the file away and measure again"
            )

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
        with Connection(path, create=False) as other:
            if other.path.resolve() == self.path.resolve():
                raise BadInput(f"database: {path} is this database itself; name another file")
        self.connection.execute("ATTACH DATABASE ? AS other", (str(path),))
        try:
            with self.transaction() as db:
                return _merge_attached(db)
        except sqlite3.DatabaseError as error:
            raise BadInput(
                f"database: {path} cannot be merged into {self.path} ({error}); nothing changed; "
                "name another file"
            ) from None
        finally:
            self.connection.execute("DETACH DATABASE other")

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, error: BaseException | None, trace):
        self.close()
        if isinstance(error, sqlite3.DatabaseError):  # A part of the file may be damaged.
            raise BadInput(unusable(self.path, error)) from error


def make_tables(db: sqlite3.Connection, journal_mode: str) -> None:
    """Create the tables in a file without tables. Several processes may call this at once."""
    end = time.monotonic() + WAIT_S
    while not db.execute("SELECT 1 FROM sqlite_master").fetchone():
        # SQLite ignores this pragma after the first table.
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        try:
            db.execute(f"PRAGMA journal_mode = {journal_mode}").fetchall()
        except sqlite3.OperationalError as error:
            # Another process changes the mode too, and SQLite does not wait for this lock.
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)
            continue
        db.executescript("; ".join(("BEGIN IMMEDIATE", *SCHEMA, "COMMIT")))


def unusable(path: Path, error: Exception) -> str:
    """Return an error message with SQLite's reason why a file cannot be used."""
    return (
        f"database: {path} cannot be used ({error}); close programs that use it, free space, or "
        "name another file"
    )


def days_ago(db: sqlite3.Connection, days: float) -> str:
    """Return the time that was some days ago, in the format of the start of a run.

    The result is an empty string for a time before SQLite's calendar.
    """
    query = "SELECT strftime('%Y-%m-%dT%H:%M:%f', 'now', ?)"
    return db.execute(query, (f"-{days} days",)).fetchone()[0] or ""


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
        db.execute("DELETE FROM main.runs WHERE run_id = ?", run)  # SQLite also deletes its rows.
        for table in ("runs", *TABLES_OF_CASES):
            columns = ", ".join(columns_of(db, table))
            chosen = f"SELECT {columns} FROM other.{table} WHERE run_id = ? ORDER BY rowid"
            db.execute(f"INSERT INTO main.{table} ({columns}) {chosen}", run)
    return len(taken)


def process_name(pid: int | None = None) -> str:
    """Return the name `HOST:PID:BEGAN` of a process, by default of this process.

    The name differs from that of a later process with the same process ID.
    """
    pid = pid or os.getpid()
    return f"{host()}:{pid}:{_began(pid):.2f}"


@functools.cache
def host() -> str:
    """Return a hash of this machine's name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def alive(process: str) -> bool | None:
    """Return whether a process runs, from its name, or None for a process of another machine."""
    place, _, started = process.partition(":")
    if place != host():
        return None
    pid, began = started.split(":")
    try:
        ended = psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
        # The system rounds the boot time to a second.
        return not ended and abs(_began(int(pid)) - float(began)) < 1.5
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def _began(pid: int) -> float:
    """Return the time from the boot to the start of a process, in s.

    A change of the system clock moves both times, so the difference stays the same.
    """
    return psutil.Process(pid).create_time() - psutil.boot_time()
