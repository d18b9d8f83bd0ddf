"""Python's garbage collector while something is timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect nothing within; what lives already is frozen, so that `gc.collect()` between blocks is cheap.

    The collector is left as it was found: off where it was off, and what someone else froze stays frozen. Within `settled_heap`
    what was made since it last set aside is frozen where it is much, such as all that compiling leaves behind.
    """
    was_enabled, within, start = gc.isenabled(), _frozen_here, time.perf_counter()
    with _freezing() as freezes:
        gc.collect()
        is_slow = within and time.perf_counter() - start > _SLOW_S
        if freezes or is_slow:
            gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            if is_slow:
                gc.unfreeze()  # what the case has made must be collected when it is over
            if was_enabled:
                gc.enable()


@contextmanager
def settled_heap() -> Iterator[Callable[[], None]]:
    """Between cases, set aside what lives then, so that collecting within a case looks at what the case has made alone.

    A process that has torch and a notebook's packages in it takes a tenth of a second to look at all, a hundred times per sweep.

    Yields:
        What sets aside; to be called between cases. Where someone else has frozen objects it does nothing. Within another of
        these it sets aside too, and the outer one lets it go.
    """
    within = _frozen_here

    def settle() -> None:
        if freezes or within:
            gc.collect()
            gc.freeze()

    with _freezing() as freezes:
        yield settle


# Python 3.12 starts with 375 frozen objects of its own. A program that freezes sets aside all that lives: 4,000 objects at least.
_AT_START = 1_000
_frozen_here = False
_SLOW_S = 0.01  # of a collection: a block takes half as long


@contextmanager
def _freezing() -> Iterator[bool]:
    """Whether nobody has frozen anything, so that one may within; what one has frozen is let go at the end."""
    global _frozen_here
    # torch's half a million of objects take 20 ms to count, so it is known without where it was done here
    if _frozen_here or gc.get_freeze_count() > _AT_START:
        yield False
        return
    _frozen_here = True
    try:
        yield True
    finally:
        _frozen_here = False
        gc.unfreeze()
