"""Clocks: the host's, and a GPU's by its events."""

import contextlib
from types import SimpleNamespace

import torch

from nanolib.meters import clock


def test_the_host_clock_reads_each_phase_and_waits_for_the_device(monkeypatch):
    now, told = iter(range(0, 10**9, 10**6)), []
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=lambda: next(now)))
    calls = [lambda: told.append("a"), lambda: told.append("b")]
    rows = clock.HostClock(lambda: told.append("|")).time_block(calls, 2, 2)
    assert rows == [[0.5, 0.5], [0.5, 0.5]]  # a millisecond per reading, two calls in each
    assert "".join(told) == "|aa|bb|" * 2
    assert clock.HostClock().time_block(calls, 1, 1) == [[1.0, 1.0]]


def test_each_device_has_its_clock():
    assert clock.clock_for("cpu").synchronize is None and clock.synchronizer("cpu")() is None
    assert clock.clock_for("cuda:1").device == torch.device("cuda:1")
    assert clock.clock_for("mps").synchronize is torch.mps.synchronize
    waiting = clock.clock_for("xpu:0").synchronize
    assert (waiting.func, *waiting.args) == (torch.xpu.synchronize, torch.device("xpu:0"))


def test_a_gpus_clock_gives_each_phase_its_own_time_on_its_own_device(monkeypatch):
    seen, now = [], [0.0]

    def event(enable_timing):
        assert enable_timing
        made = SimpleNamespace(elapsed_time=lambda end: end.at - made.at)
        made.record = lambda: setattr(made, "at", now[0])
        return made

    @contextlib.contextmanager
    def device(chosen):
        yield seen.append(str(chosen))
        seen.append("left")

    def work(ms):
        seen.append(ms)
        now[0] += ms

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronize"))
    rows = clock.clock_for("cuda:1").time_block([lambda: work(3.0), lambda: work(5.0)], 2, 2)
    assert rows == [[3.0, 5.0], [3.0, 5.0]]
    assert seen == ["cuda:1", "synchronize", *[3.0, 3.0, 5.0, 5.0] * 2, "synchronize", "left"]
