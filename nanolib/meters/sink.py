"""Where meters hand over rows as they make them; `nanolib.store.traces.Trace` keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Sink(Protocol):
    """Takes rows of the tables in `nanolib.store.schema.TRACE_TABLES`."""

    def name(self, text: str) -> int:
        """Give the index that stands for a name."""
        ...

    def at_us(self, t_s: float) -> int:
        """Give a moment of `time.monotonic`, in microseconds since the trace began."""
        ...

    def put(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        """Queue rows."""
        ...

    def flush(self) -> str:
        """Wait until they are committed; returns what went wrong, empty for nothing."""
        ...
