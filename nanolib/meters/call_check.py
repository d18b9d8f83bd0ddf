"""Check whether the time of a function is meaningful, from the results of its first two calls.

The time of a call that only starts its work, or that returns a cached result, is meaningless. If
torch stops compiling a function, torch raises an error, because nanolib must not time the function
as a compiled function.

`nano ab` loads this module into processes that run other versions of nanolib. Therefore, the module
imports nothing from nanolib.
"""

import contextlib
import inspect
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

CACHED = (
    "later calls returned the first call's result; time a function that computes it in each call"
)
# A cold first call takes less than 100 times as long as the second call.
_CACHED_RATIO = 100
# Collectives, processes, futures and threads have one of these methods.
_WAITS = ("wait", "add_done_callback", "is_alive")


class CallCheck:
    """Wrap a function for its first two calls, and check their results.

    Args:
        call: The timed function.
        what: Name of the function in errors.
        error: Type of the error if a call only starts its work.

    Attributes:
        call: The function without the check, for calls after the first two.
        is_cached: Whether the second call took almost no time and returned the first result.

    Example:
        >>> CallCheck(lambda: map(abs, [-1]), "steps", ValueError)()
        Traceback (most recent call last):
        ValueError: steps: a call only starts the work and returns a map; ...
    """

    def __init__(self, call: Callable[[], object], what: str, error: type[Exception]):
        self.call, self.is_cached = call, False
        self._what, self._error = what, error
        # Of the first call: the time in ns, a function that returns the result, and the writes.
        self._first = None

    def __call__(self):
        """Call the function, check its result, and return it."""
        dynamo = sys.modules.get("torch._dynamo")  # torch imports `torch._dynamo` to compile.
        changes = {"fail_on_recompile_limit_hit": True}
        start = time.perf_counter_ns()
        with dynamo.config.patch(changes) if dynamo else contextlib.nullcontext():
            result = self.call()
        took_ns = time.perf_counter_ns() - start
        if self._first is None:
            self._refuse_unfinished(result)
            self._first = took_ns, _reference_to(result), _writes(result)
        else:
            first_ns, kept, writes = self._first
            is_same = result is not None and result is kept() and _writes(result) == writes
            self.is_cached |= is_same and first_ns >= _CACHED_RATIO * took_ns
        return result

    def _refuse_unfinished(self, result):
        found = result[0] if isinstance(result, list | tuple) and result else result
        waits = any(callable(getattr(type(found), name, None)) for name in _WAITS)
        if not waits and not isinstance(found, Iterator | AsyncIterator | Awaitable):
            return
        if inspect.iscoroutine(found):
            found.close()  # Otherwise, Python warns that the coroutine was never awaited.
        why = f"a call only starts the work and returns a {type(found).__name__}"
        raise self._error(f"{self._what}: {why}; give a function that finishes the work")


def _reference_to(result) -> Callable[[], object]:
    """Return a weak reference to the result if possible, or otherwise a strong reference."""
    try:
        return weakref.ref(result)
    except TypeError:
        return lambda: result


def _writes(result) -> int:
    """Count the writes to a tensor, because an in-place output is the same object in each call."""
    with contextlib.suppress(RuntimeError):  # A tensor of inference mode does not count writes.
        return getattr(result, "_version", 0)
    return 0
