"""The other end of `server.py`: starts a version's process, asks it, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from nanolib.measurement import BadInput, Status
from nanolib.paths import OUTPUT_VARIABLE
from nanolib.regression.worktree import Version

# How many of a version's processes are forked from one. How that one lies in memory is an effect of its own on all of them, which
# shifts a median by up to a per cent; starting another takes seconds.
CHILDREN = 4

# Each of OpenMP's threads keeps to a core of its own: left free, two are at times put on one, and a process takes 30 ms for what
# another does in 18, all its life long.
_BOUND = {"OMP_PROC_BIND": "true"}

_SERVER = Path(__file__).with_name("server.py")
_CHUNK = 1 << 16


class VersionDied(RuntimeError):
    """A version's process ended or fell silent, or what it was timing ended before its time.

    Args:
        process: Which.
        message: How.
        status: What its case becomes.
    """

    def __init__(self, process: VersionProcess, message: str, status: str = Status.ERROR) -> None:
        self.process, self.status = process, status
        super().__init__(message)


class VersionProcess:
    """A version in a process of its own.

    Args:
        version: Which.
        silence_s: How long one answer may take.
        forks: Whether `begin` forks a child that serves what follows, from a process that `CHILDREN` share; else it starts anew.
    """

    def __init__(self, version: Version, silence_s: float, *, forks: bool = False) -> None:
        self.version, self.silence_s, self._forks = version, silence_s, forks
        self._serves = False  # since the last `begin`
        # What the first child imported from elsewhere; later parents import it before they fork.
        self._modules: list[str] = []
        self._start()

    @property
    def has_imported(self) -> bool:
        """Whether what serves had most of its imports done before it began."""
        return bool(self._modules)

    def _start(self) -> None:
        version, self._children = self.version, 0
        self._output = tempfile.TemporaryDirectory(prefix="nanolib-side-")  # its rows go to us, and its files nowhere
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-W", "ignore", str(_SERVER), *version.import_folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=version.root / version.folder if (version.root / version.folder).is_dir() else version.root,
            env=(_BOUND if self._forks else {}) | os.environ | {OUTPUT_VARIABLE: self._output.name},
            start_new_session=True,  # Ctrl-C reaches us alone, and the whole group can be ended
        )

    def retire(self) -> None:
        """Have what serves end.

        Raises:
            VersionDied: It had ended by itself, or says nothing.
        """
        if not self._serves:
            return
        had_imported, self._serves = self.has_imported, False
        if self._forks:
            told = self.ask(do="end", tell=not had_imported)["modules"]
            self._answer()
            self._modules = self._modules or told
            self._children += 1
        if not self._forks or not had_imported or self._children == CHILDREN:
            self.close()
            self._start()

    def begin(self) -> None:
        """Have a fresh process serve what follows; `begun` waits until it does."""
        if self._forks:
            self.send(do="fork", modules=[] if self._children else self._modules)
        self._serves = True

    def begun(self) -> None:
        """Wait for the process that was begun."""
        if self._forks:
            self.receive()

    def send(self, **request: Any) -> None:
        """Ask, without waiting for the answer."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise VersionDied(self, self._ending(self._process.wait())) from None

    def receive(self) -> dict[str, Any]:
        """The answer to what was asked.

        Raises:
            BadInput: This version cannot serve the request.
            VersionDied: The process ended, or said nothing for too long.
        """
        answer = self._answer()
        if "refused" in answer:
            raise BadInput(f"{self.version.name}: {answer['refused']}")
        if "over" in answer:  # the child has ended, and nobody had asked it to
            raise VersionDied(self, self._ending(answer["over"]))
        return answer

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.silence_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise VersionDied(self, f"said nothing for {self.silence_s:.0f} s; raise --timeout or shrink the case")
            chunk = os.read(self._process.stdout.fileno(), _CHUNK)
            if not chunk:
                raise VersionDied(self, self._ending(self._process.wait()))
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Ask and wait."""
        self.send(**request)
        return self.receive()

    def time_block(self, calls: int, *, keep: bool) -> list[list[float]]:
        """Have it time a block: ms of each call and phase.

        Raises:
            VersionDied: As `receive`, or the code that was timed raised.
        """
        answer = self.ask(do="block", calls=calls, keep=keep)
        if "ms" not in answer:
            raise VersionDied(self, answer.get("message", "it ended in the middle of its timing"), answer["ended"])
        return answer["ms"]

    def _ending(self, code: int) -> str:
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"its process ended with {code}: {lines[-1] if lines else 'no message'}"

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):  # a request that nobody reads any more
                stream.close()
        self._output.cleanup()

    def __enter__(self) -> VersionProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sides:
    """The processes of all versions; `renew` gives each a fresh one.

    Args:
        versions: Which.
        silence_s: As in `VersionProcess`.
        forks: As in `VersionProcess`: a fresh one then costs tenths of a second and not seconds.
    """

    def __init__(self, versions: Sequence[Version], silence_s: float, *, forks: bool) -> None:
        self._new = lambda: [VersionProcess(version, silence_s, forks=forks) for version in versions]
        self.processes: list[VersionProcess] = []

    def renew(self) -> list[VersionProcess]:
        """Fresh processes."""
        try:
            for process in self.processes:
                process.retire()
        except VersionDied:  # what it was to do is done
            self.close()
        self.processes = self.processes or self._new()
        for process in self.processes:
            process.begin()
        for process in self.processes:
            process.begun()
        return self.processes

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.close()
        self.processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
