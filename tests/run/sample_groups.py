"""An experiment whose cases are timed in turns and fail as their names say."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pydantic
import torch

from nanolib.measurement import Unsupported, exact
from nanolib.run import params as shared
from nanolib.run.case import Case, Plan


class Lost(torch.AcceleratorError):
    """The error that torch raises at every call after a failed kernel."""

    def __init__(self, message):
        _LOST.append(message)
        RuntimeError.__init__(self, message)


_FIRST, _LOST = os.getpid(), []
_HELD = set()  # the cases that use memory at the moment


class Params(shared.Params):
    NAME: ClassVar[str] = "sample_groups"
    names: list[str] = pydantic.Field(["base", "other"])
    groups: list[str] = pydantic.Field(["a"])
    folder: str = ""
    mib: float = 0.0


@dataclass(frozen=True)
class GroupCase(Case):
    name: str
    of: str
    mib: float
    seq_len: int = 8
    batch_size: int = 1

    @property
    def group(self):
        return self.of

    @property
    def title(self):
        return self.name

    @property
    def is_baseline(self):
        return self.name.startswith("base")

    def plan(self):
        return Plan({"work": int(self.mib * 2**20)})

    def measure(self, params, ceilings):
        calls = Path(params.folder) / f"{self.name}.calls"
        if params.folder:
            calls.write_text((calls.read_text() if calls.exists() else "") + "x")
        _HELD.add(self.name)
        try:
            yield from self._rows(params)
        finally:
            _HELD.discard(self.name)

    def _rows(self, params):
        yield exact("flops", 1.0, scope="work")
        self._fail("before")
        blocks = 0

        def work():
            nonlocal blocks
            blocks += 1
            if blocks > 4:
                self._fail("within")
            time.sleep(0.03 if self.name == "slow" else 0.001)  # far apart on a busy machine too

        timed = yield params.timed("cpu", {"work": work})
        yield timed["work"]
        self._fail("after")

    def _fail(self, where):
        how, _, when = self.name.partition(" ")
        if when != where:
            return
        if how == "raises":
            raise ValueError("as asked")
        if how == "unsupported":
            raise Unsupported("not here")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            while True:
                time.sleep(0.01)
        if how == "stuck":  # no signal arrives, as in a kernel that never returns
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            time.sleep(1000)
        if how == "short" and len(_HELD) > 1:
            raise torch.OutOfMemoryError("out of memory")
        if how == "loses" and os.getpid() == _FIRST:
            raise Lost("an assertion on the device")
        if _LOST:
            raise RuntimeError("the device is lost to this process")


def cases(params):
    return [GroupCase("cpu", name, of, params.mib) for of in params.groups for name in params.names]
