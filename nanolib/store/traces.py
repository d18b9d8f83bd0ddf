"""Record traces of a run, rows by the thousand, which one thread writes.

    with recording(lambda: store.new_trace(run_id, case_id)):
        ...                                   # code that runs here may put rows into `current()`

A commit per row would cost milliseconds, and a large burst would keep Python's lock. So the thread
commits twice a second, in chunks.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import json
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nanolib.measurement import printable
from nanolib.store.connection import WAIT_S
from nanolib.store.schema import TRACE_TABLES

_COMMIT_S = 0.5
_CHUNK = 1000


_Batch = tuple[str, Iterable[Sequence[Any]]]  # a statement and its rows


class TraceWriter:
    """Writes what is queued, in a thread of its own with a connection of its own.

    Args:
        path: The database; its tables are there.
    """

    def __init__(self, path: Path) -> None:
        # Opened here, so that the caller sees the error.
        self._db = sqlite3.connect(
            path, timeout=WAIT_S, isolation_level=None, check_same_thread=False
        )
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._queue: queue.SimpleQueue[_Batch | threading.Event] = queue.SimpleQueue()
        self._wake, self._over = threading.Event(), False
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="nanolib-traces", daemon=True)
        self._thread.start()

    def put(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Queue rows for an INSERT or UPDATE; it takes a microsecond."""
        self._queue.put((statement, rows))

    def flush(self) -> str:
        """Wait until everything queued is committed, and return the last error, or empty text."""
        if self._thread.is_alive():
            done = threading.Event()
            self._queue.put(done)
            self._wake.set()
            done.wait()
        failure, self._failure = self._failure, ""
        return failure

    def close(self) -> str:
        """Write the rest and end the thread; return as `flush`."""
        self._over = True
        failure = self.flush()
        self._thread.join()
        return failure

    def _run(self) -> None:
        with contextlib.closing(self._db):
            is_over = False
            while not is_over:
                self._wake.wait(_COMMIT_S)
                self._wake.clear()
                is_over = self._over  # read before the queue, so that what follows is still written
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._serve(self._queue.get_nowait())

    def _serve(self, found: _Batch | threading.Event) -> None:
        if isinstance(found, threading.Event):
            found.set()
            return
        try:
            self._write(*found)
        except Exception as error:  # `flush` reports it; a thread that ended would lose more rows
            self._failure = f"{type(error).__name__}: {error}"

    def _write(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        remaining = iter(rows)
        while chunk := list(itertools.islice(remaining, _CHUNK)):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(statement, chunk)
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


class _Nowhere:
    """A writer that forgets its rows."""

    def put(self, *_: object) -> None:
        """Do nothing."""

    def flush(self) -> str:
        """Report no error."""
        return ""


class Trace:
    """The trace of one case; see `TRACE_TABLES` for its rows.

    Args:
        writer: Where rows are queued: a `TraceWriter`, or `_Nowhere`.
        trace_id: Its row in `traces`.
    """

    def __init__(self, writer: TraceWriter | _Nowhere, trace_id: int) -> None:
        self._writer, self._trace_id = writer, trace_id
        self._names: dict[str, int] = {}
        self._numbers = {table: itertools.count() for table in TRACE_TABLES}
        self.start_s = time.monotonic()

    def name(self, text: str) -> int:
        """Return the index of a name in this trace's rows."""
        if text not in self._names:
            self._names[text] = len(self._names)
            names = json.dumps(list(self._names))
            self._writer.put(
                "UPDATE traces SET names = ? WHERE trace_id = ?", [(names, self._trace_id)]
            )
        return self._names[text]

    def at_us(self, t_s: float) -> int:
        """Convert a moment of `time.monotonic` to microseconds since the trace began."""
        return round(1e6 * (t_s - self.start_s))

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Queue rows of a table, without trace and number; a generator runs in the thread."""
        number, trace_id = self._numbers[table], self._trace_id
        self._writer.put(_INSERT[table], ((trace_id, next(number), *row) for row in rows))

    def flush(self) -> str:
        """Wait until all is committed; see `TraceWriter.flush`."""
        return self._writer.flush()


_INSERT = {
    table: f"INSERT INTO {table} VALUES ({', '.join('?' * (2 + len(columns)))})"
    for table, columns in TRACE_TABLES.items()
}


# Opens the trace of the case in flight at its first use: most cases have none.
_OPEN: contextvars.ContextVar[Callable[[], Trace]] = contextvars.ContextVar(
    "open_trace", default=lambda: Trace(_Nowhere(), 0)
)


def current() -> Trace:
    """Return the trace of the case in flight, or one that forgets its rows."""
    return _OPEN.get()()


@contextlib.contextmanager
def recording(open_trace: Callable[[], Trace]) -> Iterator[None]:
    """Make `current()` this trace, opened at its first use; at the end everything is committed."""
    opened = functools.cache(open_trace)
    token = _OPEN.set(opened)
    try:
        yield
    finally:
        _OPEN.reset(token)
        if opened.cache_info().currsize and (failure := opened().flush()):
            message = (
                f"traces: some could not be written ({failure}); the measurements are complete"
            )
            print(printable(message), file=sys.stderr)
