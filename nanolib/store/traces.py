"""Record the traces of cases, and write their rows in one thread.

    with recording(lambda: store.new_trace(run_id, case_id)):
        current().put("tokens", rows)

A commit per row would take milliseconds, and one commit of many rows would block other threads.
Therefore, the thread commits twice a second, in chunks.
"""

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


_Batch = tuple[str, Iterable[Sequence[Any]]]  # A batch is a statement and its rows.


class TraceWriter:
    """Write queued rows in a thread with its own connection.

    Args:
        path: Path of an existing database.
    """

    def __init__(self, path: Path) -> None:
        # An error in the thread would not reach the caller, so this method opens the connection.
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
        """Queue rows for an INSERT or UPDATE statement. Queueing takes a microsecond."""
        self._queue.put((statement, rows))

    def flush(self) -> str:
        """Wait until all queued rows are committed. Return the last error or an empty string."""
        if self._thread.is_alive():
            done = threading.Event()
            self._queue.put(done)
            self._wake.set()
            done.wait()
        failure, self._failure = self._failure, ""
        return failure

    def close(self) -> None:
        """Write all queued rows, and end the thread."""
        self._over = True
        self.flush()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.closing(self._db):
            is_over = False
            while not is_over:
                self._wake.wait(_COMMIT_S)
                self._wake.clear()
                is_over = self._over  # The thread reads the queue after the flag, to lose no row.
                with contextlib.suppress(queue.Empty):
                    while True:
                        self._serve(self._queue.get_nowait())

    def _serve(self, found: _Batch | threading.Event) -> None:
        if isinstance(found, threading.Event):
            found.set()
            return
        try:
            self._write(*found)
        except Exception as error:  # `flush` reports the error, and the thread continues.
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
    """A writer that discards its rows."""

    def put(self, *_: object) -> None:
        """Do nothing."""

    def flush(self) -> str:
        """Report no error."""
        return ""


class Trace:
    """The trace of one case, with rows for each table of `TRACE_TABLES`.

    Args:
        writer: Writer that queues the rows.
        trace_id: ID of the trace in the table `traces`.
    """

    def __init__(self, writer: TraceWriter | _Nowhere, trace_id: int) -> None:
        self._writer, self._trace_id = writer, trace_id
        self._names: dict[str, int] = {}
        self._numbers = {table: itertools.count() for table in TRACE_TABLES}
        self.start_s = time.monotonic()

    def name(self, text: str) -> int:
        """Return the index of a name. The rows of this trace contain the index, not the name."""
        if text not in self._names:
            self._names[text] = len(self._names)
            names = json.dumps(list(self._names))
            self._writer.put(
                "UPDATE traces SET names = ? WHERE trace_id = ?", [(names, self._trace_id)]
            )
        return self._names[text]

    def at_us(self, t_s: float) -> int:
        """Convert a time of `time.monotonic`, in s, to microseconds since the trace began."""
        return round(1e6 * (t_s - self.start_s))

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Queue rows of a table. This method adds the ID of the trace and the row number.

        Args:
            table: Name of the table, a key of `TRACE_TABLES`.
            rows: Rows with the other columns. The writer's thread may consume a generator later.
        """
        number, trace_id = self._numbers[table], self._trace_id
        self._writer.put(_INSERT[table], ((trace_id, next(number), *row) for row in rows))

    def flush(self) -> str:
        """Wait until all queued rows are committed. Return the last error or an empty string."""
        return self._writer.flush()


_INSERT = {
    table: f"INSERT INTO {table} VALUES ({', '.join('?' * (2 + len(columns)))})"
    for table, columns in TRACE_TABLES.items()
}


# Most cases have no trace, so the first call of `current` opens the trace.
_OPEN: contextvars.ContextVar[Callable[[], Trace]] = contextvars.ContextVar(
    "open_trace", default=lambda: Trace(_Nowhere(), 0)
)


def current() -> Trace:
    """Return the trace of the current case, or a trace that discards its rows."""
    return _OPEN.get()()


@contextlib.contextmanager
def recording(open_trace: Callable[[], Trace]) -> Iterator[None]:
    """Make `current` return a trace within the context, and commit the rows at the end.

    Args:
        open_trace: Function that opens the trace. The first call of `current` calls this function.
    """
    opened = functools.cache(open_trace)
    token = _OPEN.set(opened)
    try:
        yield
    finally:
        _OPEN.reset(token)
        if opened.cache_info().currsize and (failure := opened().flush()):
            message = (
                f"traces: some rows could not be written ({failure}); the measurements are complete"
            )
            print(printable(message), file=sys.stderr)
