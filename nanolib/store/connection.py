"""The file as a database: opened, made, and written to as a whole or not at all."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from nanolib.measurement import BadInput
from nanolib.paths import database_path, make_folder
from nanolib.store.files import address, check_length, writable
from nanolib.store.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION

WAIT_S, _RETRY_S = 30.0, 0.02  # for another program that has the file locked; between two tries


class Connection:
    """A database that is open; `Store` says what it takes and what it refuses."""

    def __init__(self, path: str | Path | None = None, *, create: bool = True, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self.path = Path(path) if path is not None else database_path()
        self._place = self.path.absolute()  # wherever this process goes
        if create and not self.path.exists():
            make_folder(self.path.parent)
        with opening(self.path, create=create):
            self.connection = sqlite3.connect(address(self.path), timeout=wait_s, isolation_level=None, uri=True)
            self._open(create)

    def _open(self, create: bool) -> None:
        execute = self.connection.execute
        empty = check_version(self.connection, self.path)
        if not writable(self.path):
            if empty:
                raise BadInput(f"database: {self.path} is empty and cannot be written; name another")
            return
        if empty:
            execute("PRAGMA auto_vacuum = INCREMENTAL")  # only takes hold before the first table
        # A network file system may refuse WAL; the mode in force is asked for, and the classic journal serves as well.
        # What is merely looked at, such as a reference, keeps its own, which stands in its bytes.
        self.journal_mode = value_of(self._patiently(f"PRAGMA journal_mode{' = WAL' if create else ''}"))
        execute("PRAGMA synchronous = NORMAL" if self.journal_mode == "wal" else "PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        if empty:
            with self.transaction():
                # a second process may have made them meanwhile
                for statement in () if value_of(execute("PRAGMA user_version")) else SCHEMA:
                    execute(statement)

    def _patiently(self, statement: str) -> sqlite3.Cursor:
        """Try again while others are opening the file: for a change of its journal SQLite itself does not wait."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                return self.connection.execute(statement)
            except sqlite3.OperationalError as error:
                if not is_locked(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing.

        Raises:
            BadInput: The file cannot be written: its disk is full, it is read-only, another program keeps it locked, or it was
                deleted.
        """
        self._check_place()
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._roll_back()
            if is_locked(error):
                raise BadInput(locked(self.path)) from error
            remedy = "make it writable" if "readonly" in str(error) else "free space there"
            raise BadInput(
                f"database: {self.path} cannot be written ({error}); {remedy}, or name another folder"
            ) from error
        except BaseException:
            self._roll_back()
            raise

    def _check_place(self) -> None:
        """A file that was deleted is still written to by whoever has it open, and all of it lost."""
        try:
            self._place.stat()
        except FileNotFoundError:
            raise BadInput(
                f"database: {self.path} was deleted or moved while it was open; put it back, or run again"
            ) from None
        except OSError:  # what cannot be looked at may well be written
            return

    def _roll_back(self) -> None:
        if self.connection.in_transaction:  # of some errors SQLite does it by itself
            self.connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def opening(path: Path, *, create: bool = False) -> Iterator[None]:
    """Around what opens a file: one that is not there, empty, cut off, damaged or locked is told."""
    if not path.exists():
        if not create:
            raise BadInput(f"database: {path} does not exist; run `nano run quick` first or name another")
    elif not create and not path.stat().st_size:
        raise BadInput(f"database: {path} is empty; name another")
    try:
        check_length(path)
        yield
    except sqlite3.DatabaseError as error:
        if is_locked(error):
            raise BadInput(locked(path)) from None
        unsettled = Path(f"{path}-wal").exists() and not writable(path)
        remedy = "copy it with its -wal to where it can be written" if unsettled else "name another, or move it away"
        raise BadInput(f"database: {path} cannot be opened ({error}); {remedy}") from None


def is_locked(error: sqlite3.Error) -> bool:
    """Return whether another program kept the file locked until the wait was over."""
    return "is locked" in str(error)


def locked(path: Path) -> str:
    """Return the line for a file that another program keeps locked."""
    return f"database: {path} is locked by another program; close that program and run again, or name another folder"


def check_version(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether there is nothing in an opened file yet.

    Raises:
        BadInput: It is not ours, or of another version.
    """
    execute = connection.execute
    connection.text_factory = _decoded
    execute("PRAGMA trusted_schema = OFF")
    execute("BEGIN")  # one moment's view: another process may be making the same file
    version = value_of(execute("PRAGMA user_version"))
    application = value_of(execute("PRAGMA application_id"))
    empty = not value_of(execute("SELECT count(*) FROM sqlite_master"))
    execute("COMMIT")
    if not empty and application != APPLICATION_ID:
        raise BadInput(f"database: {path} is not nanolib's; name another")
    if not empty and version != SCHEMA_VERSION:
        raise BadInput(
            f"database: {path} has schema {version}, this nanolib {SCHEMA_VERSION}; move it away and measure again"
        )
    return empty


def _decoded(text: bytes) -> str:
    """Text whatever its bytes are."""
    return text.decode(errors="replace")


def open_for_reading(path: Path, wait_s: float = WAIT_S) -> sqlite3.Connection:
    """Opened for a look: nothing is written. Read-only, a journal of its own would be left beside the file."""
    connection = sqlite3.connect(address(path), timeout=wait_s, isolation_level=None, uri=True)
    connection.execute("PRAGMA query_only = ON")
    return connection


def value_of(rows: sqlite3.Cursor) -> Any:
    """The only one."""
    ((value,),) = rows
    return value
