"""The host's clock, and which clock a device has."""

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
