"""The first two calls of what is timed show whether its timing means anything.

A call that only begins its work would be timed as if the work took nothing. So would one that gives back a kept result. A function
that torch has given up compiling would be timed as if it were compiled.

It imports nothing of nanolib's: `nano ab` loads it into processes of other versions.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

CACHED = (
    "later calls returned the first call's result; time a function that computes it in each call"
)
_CACHED_RATIO = 100  # a cold first call is slower too, but by far less
# what one waits for: futures of torch and of pools, collectives, processes, threads
_WAITS = (("wait",), ("result", "done"), ("join", "is_alive"))


class CallCheck:
    """Calls what is timed, and looks at its first two calls: a lambda or a partial does not show what is behind it.

    Args:
        call: What is timed.
        what: What it is called in complaints.
        error: Raised if a call only begins its work, or if torch gives up compiling it.

    Attributes:
        call: As above; from the third call on, call it directly.
        is_cached: Whether the second call took hardly any time and returned the result of the first.

    Example:
        >>> CallCheck(lambda: map(abs, [-1]), "steps", ValueError)()
        Traceback (most recent call last):
        ValueError: steps: a call only begins the work and returns a map; give a function that finishes the work
    """

    def __init__(self, call: Callable[[], object], what: str, error: type[Exception]) -> None:
        self.call, self.is_cached = call, False
        self._what, self._error = what, error
        self._calls, self._first_ns = 0, 0
        self._kept: Callable[[], object] = lambda: None
        self._writes = 0

    def __call__(self) -> Any:
        """The result of the call."""
        self._calls += 1
        if self._calls > 2:
            return self.call()
        start = time.perf_counter_ns()
        result = self._called()
        took = time.perf_counter_ns() - start
        if self._calls == 1:
            self._refuse_begun(result)
            self._first_ns, self._kept, self._writes = took, _kept(result), _writes(result)
        else:
            same = result is not None and result is self._kept() and _writes(result) == self._writes
            self.is_cached = same and self._first_ns >= _CACHED_RATIO * took
            self._kept = lambda: None
        return result

    def _called(self) -> object:
        dynamo = sys.modules.get(
            "torch._dynamo"
        )  # it is there as soon as something is to be compiled
        if dynamo is None:
            return self.call()
        try:
            with dynamo.config.patch(fail_on_recompile_limit_hit=True):
                return self.call()
        except dynamo.exc.FailOnRecompileLimitHit:
            limit = f"torch._dynamo.config.recompile_limit ({dynamo.config.recompile_limit})"
            raise self._error(
                f"{self._what}: torch would run part of it uncompiled, beyond {limit}; raise that limit"
            ) from None

    def _refuse_begun(self, result: object) -> None:
        found = result[0] if isinstance(result, list | tuple) and result else result
        if _only_begun(found):
            if inspect.iscoroutine(found):
                found.close()  # or Python complains that nobody waits for it
            said = f"a call only begins the work and returns a {type(found).__name__}"
            raise self._error(f"{self._what}: {said}; give a function that finishes the work")


def _only_begun(result: object) -> bool:
    """Whether work is still to come, or may be."""
    has = [all(callable(getattr(type(result), name, None)) for name in names) for names in _WAITS]
    return isinstance(result, Iterator | AsyncIterator | Awaitable) or any(has)


def _kept(result: object) -> Callable[[], object]:
    """The result if somebody keeps it; what cannot be referred to weakly is kept here."""
    try:
        return weakref.ref(result)
    except TypeError:
        return lambda: result


def _writes(result: object) -> int:
    """How often a tensor was written to: one that is computed in place is the same one each time."""
    with contextlib.suppress(RuntimeError):  # one of inference mode does not count
        return getattr(result, "_version", 0)
    return 0
