"""The other end of `worker.py`: starts a version's process, asks it, and ends it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from nanolib.ab.fork_server import BOUND, CHUNK, WORKER, Forked, ForkServer, said_in
from nanolib.ab.worktree import Version
from nanolib.measurement import BadInput, Status
from nanolib.paths import OUTPUT_VARIABLE
from nanolib.run.process import describe_exit, kill_tree, start

# How many pairs of processes are forked from one. How that one lies in memory is an effect of its own on all of them; starting
# another takes seconds.
CHILDREN = 9


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
        fork_server: What it is forked from; else it is started anew.
        bound: Whether OpenMP's threads are bound to cores in one that is started anew, unless the user says otherwise.
    """

    def __init__(
        self,
        version: Version,
        silence_s: float,
        fork_server: ForkServer | None = None,
        *,
        bound: bool = False,
    ) -> None:
        self.version, self.silence_s = version, silence_s
        self._output = tempfile.TemporaryDirectory(
            prefix="nanolib-side-"
        )  # its rows go to us, and its files nowhere
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._buffer, self._stopped = b"", False
        folder = (
            version.root / version.folder
            if (version.root / version.folder).is_dir()
            else version.root
        )
        read, requests = os.pipe()
        answers, written = os.pipe()
        self._requests, self._answers = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")
        variables = {OUTPUT_VARIABLE: self._output.name}
        try:
            if fork_server:
                variables |= {
                    name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ
                }
                request = {
                    "imports": version.import_folders,
                    "folder": str(folder),
                    "environment": variables,
                }
                self._process: Forked | subprocess.Popen = fork_server.fork(
                    request, [read, written, self._log.fileno()]
                )
            else:
                self._process = start(
                    [version.python, *WORKER, str(os.getpid()), *version.import_folders],
                    stdin=read,
                    stdout=written,
                    stderr=self._log,
                    cwd=folder,
                    env=(BOUND if bound else {}) | os.environ | variables,
                )
        finally:
            os.close(read)
            os.close(written)

    @property
    def is_forked(self) -> bool:
        """Whether most imports were done before it began."""
        return isinstance(self._process, Forked)

    def send(self, **request: Any) -> None:
        """Ask, without waiting for the answer."""
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError:
            raise VersionDied(
                self, describe_exit(self._process.wait(), said_in(self._log))
            ) from None

    def receive(self) -> dict[str, Any]:
        """The answer to what was asked.

        Raises:
            BadInput: This version cannot serve the request.
            VersionDied: The process ended, or said nothing for too long.
        """
        answer = self._answer()
        if "refused" in answer:
            raise BadInput(f"{self.version.called}: {answer['refused']}")
        return answer

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.silence_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise VersionDied(
                    self,
                    f"said nothing for {self.silence_s:.0f} s; raise --timeout or shrink the case",
                )
            chunk = os.read(self._answers.fileno(), CHUNK)
            if not chunk:
                raise VersionDied(self, describe_exit(self._process.wait(), said_in(self._log)))
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
        answer = self.ask(do="block", calls=calls, keep=keep, naps=not self.is_forked)
        if self.is_forked:
            self._stop()
        if "ms" not in answer:
            raise VersionDied(
                self, answer.get("message", "it ended in the middle of its timing"), answer["ended"]
            )
        return answer["ms"]

    def _stop(self) -> None:
        """Halt it while the other version computes: OpenMP's threads look for more work for ten milliseconds.

        What is forked goes on by itself should we die: its group has lost its parent then, and the kernel wakes it.
        """
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(BadInput):  # what it was forked from is gone too
            kill_tree(self._process.pid)
            self._process.wait()
        for stream in (self._requests, self._answers, self._log):
            with contextlib.suppress(BrokenPipeError):  # a request that nobody reads any more
                stream.close()
        self._output.cleanup()

    def __enter__(self) -> VersionProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Processes:
    """A process per version; `renew` gives each a fresh one.

    The first ones start anew, which takes seconds. What all import from elsewhere is then imported once, in a process from
    which the next ones are forked, which takes hundredths of a second.

    Args:
        versions: Which.
        silence_s: As in `VersionProcess`.
        fork: Whether processes may be forked.
        bound: As in `VersionProcess`.
        log: Gets a line if the code does not allow forking.
    """

    def __init__(
        self,
        versions: Sequence[Version],
        silence_s: float,
        *,
        fork: bool,
        bound: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._versions, self._silence_s, self._fork, self._bound = versions, silence_s, fork, bound
        self._log = log
        self._own = sorted({name for version in versions for name in version.own_modules})
        self.processes: list[VersionProcess] = []
        self._modules: list[str] = []  # what both import from elsewhere; empty until it is known
        self._fork_server: ForkServer | None = None
        self._forked = 0

    def renew(self) -> list[VersionProcess]:
        """Fresh processes.

        Raises:
            BadInput: They cannot be forked.
        """
        if self._fork and not self._modules and self.processes:
            self._learn_modules()
        self.end()
        if self._modules:
            if self._forked == CHILDREN:
                self._renew_fork_server()
            self._forked += 1
        for version in self._versions:
            self.processes.append(
                VersionProcess(version, self._silence_s, self._fork_server, bound=self._bound)
            )
        return self.processes

    def _learn_modules(self) -> None:
        """Find what all versions imported from elsewhere, and whether it may be imported before them.

        Code that sets variables of the environment does so before it imports what reads them, so it must import by itself.
        Variables that the imports themselves set do not matter.
        """
        try:
            answers = [process.ask(do="tell") for process in self.processes]
        except VersionDied:  # its task is done; the next pair is asked
            return
        in_all = set.intersection(*(set(answer["modules"]) for answer in answers))
        self._modules = [name for name in answers[0]["modules"] if name in in_all]
        by_imports = self._renew_fork_server()
        if {name for answer in answers for name in answer["variables"]} - set(by_imports):
            self._log(
                "the code sets environment variables, so each process imports everything anew: "
                "expect fewer process pairs, or raise --budget"
            )
            self._end_fork_server()
            self._fork, self._modules = False, []

    def _renew_fork_server(self) -> list[str]:
        """Start another process to fork from; returns the variables that its imports set."""
        self._end_fork_server()
        self._fork_server, self._forked = ForkServer(self._silence_s), 0
        return self._fork_server.imports(self._modules, self._own)

    def end(self) -> None:
        """End all processes that serve."""
        with contextlib.ExitStack() as stack:  # each, even when one cannot be
            for process in self.processes:
                stack.callback(process.close)
            self.processes = []

    def close(self) -> None:
        """End all processes."""
        try:
            self.end()
        finally:
            self._end_fork_server()

    def _end_fork_server(self) -> None:
        if self._fork_server:
            self._fork_server.close()
        self._fork_server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
