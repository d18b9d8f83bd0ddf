"""A device that computes nothing and takes its time: kernels queue behind each other, and events tell when they would have run."""

import contextlib
from types import SimpleNamespace

import torch

from nanolib.meters.time import clock, sampler


class Stream:
    """It begins a kernel when it is launched or when the one before has ended, whichever is later."""

    def __init__(self, launch_ms, kernel_ms):
        self.host_ms = self.device_ms = 0.0
        self.launch_ms, self.kernel_ms = launch_ms, kernel_ms
        self.held = []  # how far the queue reached, when each first event came, since the device was last held

    def launch(self, kernel_ms=None):
        self.host_ms += self.launch_ms
        kernel_ms = self.kernel_ms if kernel_ms is None else kernel_ms
        self.device_ms = max(self.host_ms, self.device_ms) + kernel_ms

    def event(self, **_):
        made = SimpleNamespace(at=None)
        made.record = lambda *_: setattr(made, "at", max(self.device_ms, self.host_ms))
        made.elapsed_time = lambda other: other.at - made.at
        made.query = lambda: made.at <= self.host_ms
        return made

    def synchronize(self, *_):
        self.host_ms = max(self.host_ms, self.device_ms)

    def sleep(self, cycles):
        self.held.append(cycles)
        self.device_ms = max(self.host_ms, self.device_ms) + cycles / 1e6  # of 1 GHz

    def installed(self, monkeypatch):
        """In the place of torch's, and of the host's clock."""
        for name, own in {
            "Event": self.event,
            "synchronize": self.synchronize,
            "_sleep": self.sleep,
        }.items():
            monkeypatch.setattr(torch.cuda, name, own)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        own = SimpleNamespace(
            perf_counter=self._seconds, perf_counter_ns=lambda: round(self.host_ms * 1e6)
        )
        for module in (clock, sampler):
            monkeypatch.setattr(module, "time", own)
        return self

    def _seconds(self):
        return self.host_ms / 1e3
