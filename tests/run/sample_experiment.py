"""An experiment for the tests of the sweep, whose cases fail as their factors name it."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pydantic
import torch

from nanolib.measurement import Measurement, Unsupported, exact
from nanolib.run import params as shared
from nanolib.run.case import Case


class Params(shared.Params):
    NAME: ClassVar[str] = "sample_experiment"
    behaviors: list[str] = pydantic.Field(["ok"])
    folder: str = ""


@dataclass(frozen=True)
class SampleCase(Case):
    behavior: str

    def measure(self, params, ceilings):
        if params.folder:
            with (Path(params.folder) / f"{self.behavior}.calls").open("a") as calls:
                calls.write("x")
        found = float(torch.ones((), device=self.device))
        yield exact("flops", found, scope=self.behavior)
        kind = self.behavior.split("-")[0]
        if kind == "oom":
            torch.empty(2**62, dtype=torch.uint8, device=self.device)
        if kind == "assert":  # only a GPU reports an index beyond the end in this way
            torch.ones(2, device=self.device)[torch.tensor([8], device=self.device)]
            torch.cuda.synchronize()
        if kind == "memory":
            raise MemoryError
        if kind == "unsupported":
            raise Unsupported("no such device here")
        if kind == "error":
            raise ValueError("two\nlines")
        if kind == "slow":
            while True:
                time.sleep(0.01)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exit":
            os._exit(0)
        if kind == "nan":
            yield exact("flops", 1.0, scope="broken", details={"x": float("nan")})
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "wait":
            (Path(params.folder) / "waiting").touch()
            while not (Path(params.folder) / "go").exists():
                time.sleep(0.01)
        yield Measurement("latency", 1.0, scope="after")


def cases(params):
    device = "cpu" if params.device == "auto" else params.device
    return [SampleCase(device, behavior) for behavior in params.behaviors]
