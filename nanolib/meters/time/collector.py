"""Control Python's garbage collector during a timing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Switch the collector off and freeze all objects, so that `gc.collect()` is cheap.

    Its state is restored afterwards, and objects that others froze stay frozen. Within
    `settled_heap` newer objects are frozen only if there are many, as after compiling.
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
                gc.unfreeze()  # the case's objects must be collected when it is over
            if was_enabled:
                gc.enable()


@contextmanager
def settled_heap() -> Iterator[Callable[[], None]]:
    """Freeze all objects between cases, so that a collection within a case is short.

    A collection of all objects of torch and a notebook takes 0.1 s, a hundred times per sweep.

    Yields:
        A function to call between cases. It does nothing if others have frozen objects.
    """
    within = _frozen_here

    def settle() -> None:
        if freezes or within:
            gc.collect()
            gc.freeze()

    with _freezing() as freezes:
        yield settle


# Python 3.12 starts with 375 frozen objects. A program that freezes all objects has at least 4,000.
_AT_START = 1_000
_frozen_here = False
_SLOW_S = 0.01  # of a collection; a block takes half as long


@contextmanager
def _freezing() -> Iterator[bool]:
    """Yield whether the block may freeze objects; they are unfrozen when it ends."""
    global _frozen_here
    # counting torch's 500,000 objects takes 20 ms, so our own freeze is remembered
    if _frozen_here or gc.get_freeze_count() > _AT_START:
        yield False
        return
    _frozen_here = True
    try:
        yield True
    finally:
        _frozen_here = False
        gc.unfreeze()
