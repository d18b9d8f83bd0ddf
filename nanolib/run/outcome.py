"""Limit the time of a case, and turn each exception of the case into a status and a message."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nanolib.measurement import (
    METRICS,
    Flag,
    Measurement,
    Provenance,
    Status,
    Unsupported,
    cause,
    one_line,
)
from nanolib.meters.interference import CpuLoad, interference_flags

_PLAN_S = 60.0
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
)


class CaseTimeout(BaseException):
    """The case has reached its time limit. `except Exception` does not catch `CaseTimeout`."""


class PredictedOutOfMemory(Unsupported):
    """The case was not started, because it needs more than the free memory."""

    status = Status.OOM_PREDICTED


@dataclass
class Outcome:
    """The result of a case.

    Attributes:
        rows: Measured rows, in order, including the rows from before a failure.
        traces: Rows of the case's trace, by the name of their table.
        status: Status of the case at its end.
        message: Reason for the status, in one line.
        seconds: Duration of the case, in s.
        details: More about the end of the case: `rank`, `traceback` and `device_lost` of a failure,
            and the share of the CPUs that other processes used.
        flags: Flags of the row `case_duration`.
    """

    rows: list[Measurement] = field(default_factory=list)
    traces: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    status: Status = Status.OK
    message: str = ""
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()

    @property
    def ending(self) -> Measurement:
        """The row `case_duration`, with the duration and the status of the case."""
        return Measurement(
            "case_duration",
            self.seconds,
            n=1,
            samples=(self.seconds,),
            method="perf_counter",
            status=self.status,
            message=self.message,
            flags=self.flags,
            details=self.details,
        )

    def add_interference(self, load: CpuLoad) -> None:
        """Add the load of the CPUs during the case, and flags to the ending and all timed rows.

        A timing that recorded its own load keeps its own flags. Other rows of the same scope get
        the flags of the timing.
        """
        flags = interference_flags(load.details())
        own = {
            row.scope: [flag for flag in row.flags if flag in (Flag.BUSY_MACHINE, Flag.THROTTLED)]
            for row in self.rows
            if any(row.details.get(name) is not None for name in ("others_share", "clean_rounds"))
        }
        for index, row in enumerate(self.rows):
            is_timed = METRICS[row.metric].is_timed and row.estimate is not None
            if is_timed and row.provenance != Provenance.REPLAYED:
                both = (*row.flags, *own.get(row.scope, flags))
                self.rows[index] = replace(row, flags=tuple(dict.fromkeys(both)))
        self.details, self.flags = self.details | load.details(), flags

    def mark_timed_out(self, limit_s: float) -> None:
        """Record that the case did not end within its time limit."""
        self.status = Status.TIMEOUT
        self.message = (
            f"the case ran longer than case_timeout_s {limit_s:g}; raise it or shrink the case"
        )

    @contextmanager
    def within(self, timeout_s: float) -> Iterator[None]:
        """Run a part of the case, and turn an exception into the status and the message.

        Args:
            timeout_s: Time limit for all parts together, s. nanolib can interrupt only Python code.
                To end a kernel that never returns, set `isolation: process`.

        Raises:
            torch.AcceleratorError: This process cannot use the device again.
        """
        start = time.perf_counter()
        try:
            # A timer of 0 s would never expire.
            with _time_limit(max(timeout_s - self.seconds, 0.001)):
                yield
        except CaseTimeout:
            self.mark_timed_out(timeout_s)
        except Unsupported as error:
            self.status, self.message = error.status, one_line(error)
        except (Exception, SystemExit) as error:  # A user's code may call sys.exit.
            self.status = Status.OOM if is_out_of_memory(error) else Status.ERROR
            self.message = cause(error)
            self.details = getattr(error, "details", {})
            if isinstance(error, torch.AcceleratorError):
                self.details = self.details | {"device_lost": True}
                raise
        finally:
            self.seconds += time.perf_counter() - start


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on the device or on the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


@contextmanager
def planning_time_limit() -> Iterator[None]:
    """Limit the time within the context to 60 s, for a user's code on tensors without data.

    Raises:
        TimeoutError: The code within the context took more than 60 s.
    """
    try:
        with _time_limit(_PLAN_S):
            yield
    except CaseTimeout:
        message = f"the call takes more than {_PLAN_S:g} s on tensors without data"
        raise TimeoutError(message) from None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `CaseTimeout` after a time in s. Outside the main thread, there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_):
        raise CaseTimeout

    before = signal.signal(signal.SIGALRM, expire)
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # A process has only one timer. An outer limit now gets its remaining time back. This limit
        # ends before its handler does, because the default handler ends the process.
        signal.setitimer(signal.ITIMER_REAL, outer_s)
        signal.signal(signal.SIGALRM, before)
