"""Stopwatches that profilers read: pauses are taken off, and a GPU's events are used again."""

import torch

from nanolib.meters.time.stopwatch import (
    CpuStopwatch,
    CudaStopwatch,
    WaitingStopwatch,
    stopwatch_for,
)


def test_a_stopwatch_stands_still_in_pauses_and_skips_what_it_is_told(clock):
    watch = CpuStopwatch()
    begin = watch.mark()
    clock[0] += 100
    watch.pause()
    clock[0] += 1000
    watch.resume()
    clock[0] += 20
    watch.skip(3)
    assert watch.nanoseconds(begin, watch.mark()) == 117
    assert watch.settle() is None and watch.forget() is None
    assert type(stopwatch_for("cpu")) is CpuStopwatch and isinstance(
        stopwatch_for("mps"), WaitingStopwatch
    )


class _Event:
    made = 0

    def __init__(self, enable_timing):
        assert enable_timing
        _Event.made += 1

    def record(self, stream):
        self.at = stream[0]

    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6


def test_a_gpus_stopwatch_takes_pauses_off_and_uses_its_events_again(monkeypatch):
    now, waited = [0], []
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    watch, _Event.made = stopwatch_for("cuda:1"), 0
    assert isinstance(watch, CudaStopwatch)

    def paused(ns):
        watch.pause()
        now[0] += ns
        watch.resume()

    paused(7)
    begin = watch.mark()
    now[0] += 2_000_000
    paused(1000)
    now[0] += 20
    watch.skip(5)
    end = watch.mark()
    paused(50)
    later = watch.mark()
    watch.settle()
    assert (watch.nanoseconds(begin, end), watch.nanoseconds(end, later), waited) == (
        2_000_020,
        0,
        ["cuda:1"],
    )
    assert _Event.made == 9
    watch.forget()
    for _ in range(9):
        watch.mark()
    assert _Event.made == 9 and watch.mark()[1] == 0 and _Event.made == 10
