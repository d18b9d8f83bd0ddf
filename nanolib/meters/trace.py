"""Collect the readings of a case that the database stores in tables of their own."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Trace:
    """The readings of a case, in lists, so that collecting costs a window no disk access.

    A case yields its trace, and nanolib stores the rows together with the measurements of the case.

    Attributes:
        start_s: Time of `time.monotonic` at which the trace began, s.
        rows: Name of a table of `nanolib.store.schema.TRACE_TABLES` → rows, with the columns in the
            order of the table.

    Example:
        >>> trace = Trace(start_s=1.0)
        >>> trace.rows["tokens"].append((trace.at_us(1.5), 2000))
        >>> dict(trace.rows)
        {'tokens': [(500000, 2000)]}
    """

    start_s: float = field(default_factory=time.monotonic)
    rows: defaultdict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))

    def at_us(self, t_s: float) -> int:
        """Convert a time of `time.monotonic`, in s, to microseconds since the trace began."""
        return round(1e6 * (t_s - self.start_s))
