"""Make, open and write a database file, whole or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from nanolib.measurement import BadInput
from nanolib.paths import database_path, make_folder, put_in_place
from nanolib.store.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION

WAIT_S = 30.0  # for another program that has the file locked


class Connection:
    """An open database; see `Store`."""

    def __init__(self, path: str | Path | None = None, *, create: bool = True) -> None:
        self.path = Path(path) if path is not None else database_path()
        if not self.path.exists():
            if not create:
                raise BadInput(
                    f"database: {self.path} does not exist; "
                    "run `nano run quick` first or name another"
                )
            make_folder(self.path.parent)
            make_database(self.path)
        self.connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
        try:
            check_version(self.connection, self.path)
        except sqlite3.DatabaseError as error:
            self.connection.close()
            raise BadInput(unusable(self.path, error)) from None
        except BadInput:
            self.connection.close()
            raise
        self.connection.execute("PRAGMA foreign_keys = ON")
        # A network file system may have refused WAL; the classic journal is safe only if synced.
        self.journal_mode = value_of(self.connection.execute("PRAGMA journal_mode"))
        self.connection.execute(
            f"PRAGMA synchronous = {'NORMAL' if self.journal_mode == 'wal' else 'FULL'}"
        )

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Write all or nothing.

        Raises:
            BadInput: The file cannot be written: its disk is full, it is read-only, or another
                program keeps it locked.
        """
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:  # SQLite itself rolls back after some errors
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise BadInput(unusable(self.path, error)) from error
            raise

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_database(path: Path) -> None:
    """Make an empty database, unless another process makes it at the same moment.

    Raises:
        BadInput: It cannot be written.
    """
    try:
        with put_in_place(path) as file:
            write_schema(file, "WAL")
    except FileExistsError:
        return
    except (OSError, sqlite3.Error) as error:
        raise BadInput(unusable(path, error)) from None


def write_schema(file: Path, journal_mode: str) -> None:
    """Make the tables of a new file."""
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only takes hold before the first table
        db.execute(f"PRAGMA journal_mode = {journal_mode}").fetchall()
        db.executescript(";".join(("BEGIN", *SCHEMA, "COMMIT")))


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Check that an open file is nanolib's and of this version.

    Raises:
        BadInput: It is not.
    """
    application, version = (
        value_of(connection.execute(f"PRAGMA {name}"))
        for name in ("application_id", "user_version")
    )
    if application != APPLICATION_ID:
        raise BadInput(f"database: {path} is not nanolib's; name another")
    if version != SCHEMA_VERSION:
        raise BadInput(
            f"database: {path} has schema {version}, this nanolib {SCHEMA_VERSION}; "
            "move it away and measure again"
        )


def unusable(path: Path, error: Exception) -> str:
    """Return the message about a file that cannot be used."""
    problem = f"cannot be opened ({error}); name another, or move it away"
    if "is locked" in str(error):
        problem = "is locked by another program; close that program and run again, or name another"
    elif isinstance(error, sqlite3.OperationalError | OSError):
        problem = f"cannot be used ({error}); free space, make it writable, or name another folder"
    return f"database: {path} {problem}"


def value_of(rows: sqlite3.Cursor) -> Any:
    """Return the only value of a query."""
    ((value,),) = rows
    return value
