"""Garbage is collected between blocks, never in one, and the collector is left as it was found."""

import gc

import pytest

from nanolib.meters.time import sampler
from nanolib.meters.time.latency import measure
from nanolib.meters.time.sampler import pause_collector, settled_heap


@pytest.fixture
def nothing_is_frozen(monkeypatch):
    """As in a process of a user's: here the objects of earlier files are."""
    gc.unfreeze()
    monkeypatch.setattr(sampler, "_frozen_here", False)
    yield
    gc.unfreeze()
    gc.freeze()


def test_the_collector_is_off_inside_and_as_before_afterwards(clocked, nothing_is_frozen):
    clocked([10.0] * 100)
    inside = []
    measure(lambda: inside.append(gc.isenabled()))
    assert not any(inside) and gc.isenabled() and gc.get_freeze_count() == 0


def test_what_python_itself_has_frozen_at_its_start_is_nobodys(monkeypatch, nothing_is_frozen):
    """Python 3.12 starts with 375 such objects; taken for a program's, each collection between blocks looks at everything."""
    counted = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted() + 375)
    with pause_collector():
        assert counted() > 9_000
    assert counted() == 0
    with settled_heap() as settle:
        settle()
        assert counted() > 9_000
    assert counted() == 0


def test_an_error_in_the_call_reaches_the_caller_and_restores_the_collector():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0)
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_the_collector_is_left_as_it_was_found(nothing_is_frozen, enabled, frozen):
    if frozen:
        gc.freeze()
    if not enabled:
        gc.disable()
    try:
        with pause_collector():
            assert not gc.isenabled() and gc.get_freeze_count() > 0
        # what is frozen may still die of old age: how much is left says nothing
        assert (gc.isenabled(), gc.get_freeze_count() > 0) == (enabled, frozen)
    finally:
        gc.enable()
