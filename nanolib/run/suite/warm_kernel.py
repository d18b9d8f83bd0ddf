"""Papermill and a kernel that start before it is known what they run: their imports go on beside those of the command.

Parameters are checked by the experiments themselves, which import torch; the kernel imports the same again. One after the other
that is most of what a short run takes. Nothing is measured yet while both happen at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from nanolib.paths import OUTPUT_VARIABLE
from nanolib.run.launch import LAUNCH_VARIABLE, PART_VARIABLE, command, new_token
from nanolib.run.process import end_tree, start
from nanolib.scratch import Scratch

_GRACE_S = 1.5  # between asking processes to end and ending them
_SETTLE_S = 2.0  # whoever outlives the process may hold its output open
_ENGINE = "nanolib-ahead"
_KERNEL = ("--HistoryManager.hist_file=:memory:",)  # as papermill starts one
# What the first cells of a notebook need: the first tensor without data imports dynamo and sympy.
_IMPORTS = "import gc; gc.disable(); import nanolib.run.plan, nanolib.report.plot, torch._dynamo; gc.enable()"


class WarmKernel:
    """A process that waits for papermill's arguments; used once, and ended with the block that it is entered for.

    Args:
        output: The output folder.
        token: Of the command; a new one by default.
        variables: Of the notebook's environment, beside ours.

    Attributes:
        token: By which the run is found.
    """

    def __init__(self, output: Path, token: str = "", variables: Mapping[str, str] | None = None) -> None:
        self.token = token or new_token()
        self._reader: threading.Thread | None = None
        self._scratch = Scratch("run")  # the kernel's description lies there
        told = {OUTPUT_VARIABLE: str(output), LAUNCH_VARIABLE: self.token, PART_VARIABLE: ""}
        self._process = start(
            command(__name__, str(self._scratch.path)),
            bufsize=0,
            stdin=subprocess.PIPE,
            # A pipe: there is no log yet, and none is made for a command that is wrong.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | told | dict(variables or {}),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        end_tree(self._process, _GRACE_S if self._reader else 0.0)
        if self._reader is not None:
            self._reader.join(_SETTLE_S)
        self._scratch.cleanup()

    @property
    def is_waiting(self) -> bool:
        """Whether it can be used."""
        return self._reader is None and self._process.poll() is None

    def papermill(self, arguments: Sequence[str], log: IO[str]) -> subprocess.Popen[bytes]:
        """Run papermill with these arguments; what it says is in `log` once the block has ended."""
        self._reader = threading.Thread(
            target=shutil.copyfileobj, args=(self._process.stdout, log.buffer.raw), daemon=True
        )
        self._reader.start()
        with contextlib.suppress(BrokenPipeError):  # it died just now: its exit code tells
            self._process.stdin.write(json.dumps(list(arguments)).encode())
            self._process.stdin.close()
        return self._process


def main() -> None:
    """In that process: start a kernel, then wait for what to run in it."""
    from jupyter_client import AsyncKernelManager
    from jupyter_core.utils import run_sync

    kernel = AsyncKernelManager(kernel_name="python3", connection_file=str(Path(sys.argv[1]) / "kernel.json"))
    kernel.kernel_spec.argv = command("ipykernel_launcher", "-f", "{connection_file}")  # it ends with this process
    run_sync(kernel.start_kernel)(extra_arguments=[*_KERNEL, f"--IPKernelApp.exec_lines={_IMPORTS}"])
    client = kernel.client()
    kernel.client = lambda: client  # papermill closes what is its own alone, and this is not
    try:
        from papermill.cli import papermill
        from papermill.engines import NBClientEngine, papermill_engines

        class Started(NBClientEngine):
            """Papermill's own engine, in the kernel that is there already."""

            @classmethod
            def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **rest: Any) -> Any:
                return super().execute_managed_notebook(nb_man, kernel_name, km=kernel, **rest)

        papermill_engines.register(_ENGINE, Started)
        if asked := sys.stdin.read():
            papermill([*json.loads(asked), "--engine", _ENGINE])
    finally:
        client.stop_channels()
        run_sync(kernel.shutdown_kernel)(now=True)
