"""An experiment for the tests of the sweep, whose cases fail as their factors name it."""

import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pydantic
import torch

from nanolib.measurement import Measurement, Unsupported, exact
from nanolib.meters.recording import Trace
from nanolib.run import case as shared
from nanolib.run.case import Case, Plan
from tests.waiting import until

LOST = []  # errors of a device that this process has lost
_IN_MEMORY = set()  # the cases that use memory at the moment


class Lost(torch.AcceleratorError):
    """The error that torch raises at every call after a failed kernel."""

    def __init__(self):
        LOST.append(self)
        RuntimeError.__init__(self, "an assertion on the device")


class Params(shared.Params):
    NAME: ClassVar[str] = "sample_experiment"
    behaviors: list[str] = pydantic.Field(["ok"])
    groups: list[str] = pydantic.Field([""])
    mib: float = 0.0
    folder: str = ""


@dataclass(frozen=True)
class SampleCase(Case):
    """A case that behaves as one word says, and as a second word says before, within or after."""

    behavior: str
    of: str = ""
    mib: float = 0.0

    def __str__(self):
        return f"{self.behavior} {self.of}".rstrip()

    @property
    def group(self):
        return self.of

    @property
    def title(self):
        return self.behavior

    @property
    def is_baseline(self):
        return self.behavior.startswith("base")

    def plan(self):
        return Plan({"work": 2**60 if self.behavior == "huge" else int(self.mib * 2**20)})

    def measure(self, params, ceilings):
        if LOST:
            raise RuntimeError("the device is lost to this process")
        if params.folder:
            with (Path(params.folder) / f"{self.behavior}.calls").open("a") as calls:
                calls.write("x")
        _IN_MEMORY.add(self.behavior)
        try:
            yield from self._rows(params)
        finally:
            _IN_MEMORY.discard(self.behavior)

    def _rows(self, params):
        trace = Trace()
        yield trace
        trace.rows["tokens"].append((1, 2))
        yield exact("flops", float(torch.ones((), device=self.device)), scope="work")
        self._behave("before", params.folder)
        blocks = itertools.count()

        def work():
            if next(blocks) > 4:
                self._behave("within", params.folder)
            time.sleep(0.03 if self.behavior == "slower" else 0.001)  # far apart when busy too

        if self.behavior == "nan":
            yield exact("flops", 1.0, scope="broken", details={"x": float("nan")})
        if self.of:
            timed = yield params.timing("cpu", {"work": work})
            yield timed["work"]
        else:
            yield Measurement("latency", 1.0, scope="work")
        self._behave("after", params.folder)

    def _behave(self, now, folder):
        kind, _, when = self.behavior.partition(" ")
        if now != (when or "before"):
            return
        if kind == "error":
            raise ValueError("two\nlines")
        if kind == "unsupported":
            raise Unsupported("no such device here")
        if kind == "oom":
            torch.empty(2**62, dtype=torch.uint8, device=self.device)
        if kind == "memory":
            raise MemoryError
        if kind == "short" and len(_IN_MEMORY) > 1:
            raise torch.OutOfMemoryError("out of memory")
        if kind == "assert":  # only a GPU reports an index beyond the end in this way
            torch.ones(2, device=self.device)[torch.tensor([8], device=self.device)]
            torch.cuda.synchronize()
        if kind == "loses":
            raise Lost
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stuck":  # no signal arrives, as in a kernel that never returns
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(1000)
        while kind == "slow":
            time.sleep(0.01)
        if kind == "wait":
            (Path(folder) / "waiting").touch()
            until((Path(folder) / "go").exists)


def cases(params):
    device = "cpu" if params.device == "auto" else params.device
    return [
        SampleCase(device, behavior, group, params.mib)
        for group in params.groups
        for behavior in params.behaviors
    ]


def ends(run):
    """The status and the message of each case of a run, by its behavior."""
    rows = run.measurements()
    rows = rows[rows.metric == "case_duration"].set_index("factor.behavior")
    return rows[["status", "message"]]


def statuses(run):
    """The status of each case of a run, by its behavior."""
    return ends(run).status.to_dict()
