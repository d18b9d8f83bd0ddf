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

from nanolib.experiments.launch import LAUNCH_VARIABLE, PART_VARIABLE, command, new_token
from nanolib.experiments.launcher import end_tree
from nanolib.paths import OUTPUT_VARIABLE
from nanolib.scratch import Scratch

_SETTLE_S = 2.0  # whoever outlives the process may hold its output open
_ENGINE = "nanolib-ahead"
_KERNEL = ("--HistoryManager.hist_file=:memory:",)  # as papermill starts one
_IMPORTS = "import nanolib.experiments.plan, nanolib.report.charts"  # what the first cell of a notebook needs


def start(
    arguments: Sequence[str], variables: Mapping[str, str], scratch: Scratch, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start `-m ARGUMENT...` for a notebook: it ends when we do, and Ctrl-C is ours to handle.

    Args:
        arguments: A module and what it is given.
        variables: Of its environment, beside ours.
        scratch: Where Jupyter puts what describes the kernel.
        streams: As `subprocess.Popen` takes them.
    """
    return subprocess.Popen(
        command(*arguments),
        stderr=subprocess.STDOUT,
        env=os.environ | dict(variables) | {"JUPYTER_RUNTIME_DIR": str(scratch.path)},
        start_new_session=True,
        **streams,
    )


def told(output: Path, token: str, part: str = "") -> dict[str, str]:
    """What the environment tells a notebook: the output folder, the command's token, and which part it is."""
    return {OUTPUT_VARIABLE: str(output), LAUNCH_VARIABLE: token, PART_VARIABLE: part}


class Ahead:
    """A process that waits for papermill's arguments; used once, or ended with the block that it is entered for.

    Args:
        output: The output folder.

    Attributes:
        token: By which the run is found.
    """

    def __init__(self, output: Path) -> None:
        self.token = new_token()
        self._reader: threading.Thread | None = None
        # A pipe: there is no log yet, and none is made for a command that is wrong.
        streams = {"bufsize": 0, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._scratch = Scratch("run")
        self._process: subprocess.Popen[bytes] | None = start(
            [__name__], told(output, self.token), self._scratch, **streams
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            end_tree(self._process)
        self._scratch.cleanup()

    def papermill(self, arguments: Sequence[str], log: IO[str]) -> subprocess.Popen[bytes] | None:
        """Run papermill with these arguments, what it says into `log`; None where the process is used up or gone."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return None
        self._reader = threading.Thread(target=shutil.copyfileobj, args=(process.stdout, log.buffer.raw), daemon=True)
        self._reader.start()
        with contextlib.suppress(BrokenPipeError):  # it died just now: its exit code tells
            process.stdin.write(json.dumps(list(arguments)).encode())
            process.stdin.close()
        return process

    def settle(self) -> None:
        """Wait until all that the ended process said is in the log."""
        if self._reader is not None:
            self._reader.join(_SETTLE_S)


def main() -> None:
    """In that process: start a kernel, then wait for what to run in it."""
    from jupyter_client import AsyncKernelManager
    from jupyter_core.utils import run_sync

    kernel = AsyncKernelManager(kernel_name="python3")
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


if __name__ == "__main__":
    main()
