"""A clock that stands still unless it is told to go on, and one that hands out a series."""

import itertools
from types import SimpleNamespace

import pytest

from nanolib.meters import clock as clocks
from nanolib.meters import latency, overhead, ranks, sampler


@pytest.fixture
def clock(monkeypatch):
    """Nanoseconds, as a list of one; what measures processor time sees half of them."""
    now = [0]
    watch = SimpleNamespace(
        perf_counter_ns=lambda: now[0],
        perf_counter=lambda: now[0] / 1e9,
        thread_time_ns=lambda: now[0] // 2,
    )
    for module in (clocks, overhead, ranks):
        monkeypatch.setattr(module, "time", watch)
    return now


class FakeClock:
    """Hands out a series of milliseconds in place of time; after its end the last value repeats."""

    method, gpu = "fake", None

    def __init__(self, series, resolution=1e-6):
        self.series = itertools.chain(series, itertools.repeat(series[-1]))
        self.resolution_ms, self.asked = resolution, []

    def warm_up(self, phases):
        pass

    def time_block(self, phases, calls, inner):
        self.asked.append((calls, inner))
        rows = []
        for _ in range(calls):
            for phase in phases:
                phase()
            rows.append([next(self.series) for _ in phases])
        return rows


@pytest.fixture
def clocked(monkeypatch):
    # so that a budget of seconds is never spent, however slow the machine is
    ticks = itertools.count()

    def use(series, **rest):
        clock = FakeClock(series, **rest)
        watch = SimpleNamespace(perf_counter=lambda: next(ticks) / 1e6)
        monkeypatch.setattr(sampler, "time", watch)
        monkeypatch.setattr(latency, "clock_for", lambda device: clock)
        monkeypatch.setattr(latency, "wait_for_compilers", lambda: None)
        return clock

    return use
