"""Clocks: the host's, and a GPU's by its events."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from nanolib.meters.time import clock


def test_the_host_clock_reads_each_phase_and_waits_for_the_device(monkeypatch):
    now, told = iter(range(0, 10**9, 10**6)), []
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=lambda: next(now)))
    calls = [lambda: told.append("a"), lambda: told.append("b")]
    rows = clock.HostClock(lambda: told.append("|")).time_block(calls, 2, 2)
    assert rows == [[0.5, 0.5], [0.5, 0.5]]  # a millisecond per reading, two calls in each
    assert "".join(told) == "|" + "aa|bb|" * 2
    assert clock.HostClock().time_block(calls, 1, 1) == [[1.0, 1.0]]


def test_a_clocks_step_is_the_smallest_that_is_seen(monkeypatch):
    now = itertools.accumulate(itertools.cycle([0, 700, 300, 0]))
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter_ns=lambda: next(now)))
    clock._perf_counter_step_ns.cache_clear()
    try:
        assert clock.HostClock().resolution_ms() == pytest.approx(300e-6)
    finally:
        clock._perf_counter_step_ns.cache_clear()


def test_each_device_has_its_clock():
    cpu, gpu = clock.clock_for("cpu"), clock.clock_for("cuda:0")
    assert (cpu.synchronize, cpu.method) == (None, "perf_counter")
    assert (gpu.device, gpu.method) == (torch.device("cuda:0"), "cuda_event")
    assert clock.clock_for("mps").synchronize is torch.mps.synchronize
    assert clock.synchronizer("cpu")() is None
    for name in ("cuda", "xpu"):
        waiting = clock.synchronizer(f"{name}:0")
        assert waiting.func is getattr(torch, name).synchronize
        assert waiting.args == (torch.device(f"{name}:0"),)


class _Event:
    """A CUDA event of a device whose clock is `now`, in ms."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = _Event.now

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_gpus_clock_gives_each_phase_its_own_time_on_its_own_device(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def device(chosen):
        seen.append(str(chosen))
        yield
        seen.append("left")

    def phase(ms):
        def call():
            seen.append(ms)
            _Event.now += ms

        return call

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("synchronize"))
    rows = clock.clock_for("cuda:1").time_block([phase(3.0), phase(5.0)], 2, 2)
    assert rows == [[3.0, 5.0], [3.0, 5.0]]
    assert seen == ["cuda:1", "synchronize", *[3.0, 3.0, 5.0, 5.0] * 2, "synchronize", "left"]
