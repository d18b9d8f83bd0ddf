"""A clock that stands still unless it is told to go on."""

from types import SimpleNamespace

import pytest

from nanolib.meters.layers import operations, overhead
from nanolib.meters.layers import profiler as layers
from nanolib.meters.time import clock as clocks
from nanolib.meters.time import stopwatch, timer, together


@pytest.fixture
def clock(monkeypatch):
    """Nanoseconds, as a list of one; what measures processor time sees half of them."""
    now = [0]
    watch = SimpleNamespace(
        perf_counter_ns=lambda: now[0],
        perf_counter=lambda: now[0] / 1e9,
        monotonic=lambda: now[0] / 1e9,
        thread_time=lambda: now[0] / 2e9,
    )
    for module in (clocks, stopwatch, layers, overhead, timer, together):
        monkeypatch.setattr(module, "time", watch)
    monkeypatch.setattr(operations, "_dead_time_ns", lambda: 0)
    return now
