"""Interface of a trace, to which meters write rows; `nanolib.store.traces.Trace` implements it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Sink(Protocol):
    """Receives rows of the tables in `nanolib.store.schema.TRACE_TABLES`."""

    def name(self, text: str) -> int:
        """Return the index of a name."""
        ...

    def at_us(self, t_s: float) -> int:
        """Convert a moment of `time.monotonic` to microseconds since the trace began."""
        ...

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Queue rows."""
        ...

    def flush(self) -> str:
        """Wait until the rows are committed; return an error, or an empty string."""
        ...
