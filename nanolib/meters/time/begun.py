"""A call that only begins its work, as one that is async or a generator does, would be timed as if the work took nothing.

It imports nothing of nanolib's: `nano ab` loads it into processes of other versions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable


def looked_at(call: Callable[[], object], what: str, error: type[Exception]) -> Callable[[], None]:
    """The call, for its first time: whether it has run is seen in what it gives, as a lambda or a partial does not show it.

    Args:
        call: What is timed from then on.
        what: What it is called.
        error: Raised where it has only begun.

    Example:
        >>> looked_at(lambda: (step for step in range(3)), "steps", ValueError)()
        Traceback (most recent call last):
        ValueError: steps: a call only begins it, as it is async or a generator; give a function that runs it to its end
    """

    def first() -> None:
        result = call()
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result):
                result.close()  # or Python complains that nobody waits for it
            said = "a call only begins it, as it is async or a generator; give a function that runs it to its end"
            raise error(f"{what}: {said}")

    return first
