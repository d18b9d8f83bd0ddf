"""Python's garbage collector while something is timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect nothing within; what lives already is frozen, so that `gc.collect()` between blocks is cheap.

    The collector is left as it was found: off where it was off, and what someone else froze stays frozen.
    """
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    if not was_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def settled_heap() -> Iterator[Callable[[], None]]:
    """Between cases, set aside what lives then, so that collecting within a case looks at what the case has made alone.

    A process that has torch and a notebook's packages in it takes a tenth of a second to look at all, a hundred times per sweep.

    Yields:
        What sets aside; to be called between cases. Where someone else has frozen objects it does nothing.
    """
    if gc.get_freeze_count() > 0:
        yield lambda: None
        return

    def settle() -> None:
        gc.collect()
        gc.freeze()

    try:
        yield settle
    finally:
        gc.unfreeze()
