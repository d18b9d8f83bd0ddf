"""The other end of `worker.py`: processes that answer requests. One kind is a version, the other forks versions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from pathlib import Path
from typing import Any, Self

from nanolib.ab.versions import Version, named_folders
from nanolib.measurement import BadInput, Status
from nanolib.paths import OUTPUT_VARIABLE
from nanolib.run.process import describe_exit, kill_tree, start

# OpenMP binds each of its threads to a core. Otherwise two of them may share one, and a process then takes 30 ms for what another
# does in 18, for all of its life.
BOUND = {"OMP_PROC_BIND": "true"}
_WORKER = ("-P", "-W", "ignore", str(Path(__file__).with_name("worker.py")))


class VersionDied(RuntimeError):
    """A process ended or did not answer, or the code that it timed raised.

    Args:
        process: The process.
        message: How it ended.
        status: The status of its case.
    """

    def __init__(self, process: Child, message: str, status: str = Status.ERROR) -> None:
        self.process, self.status = process, status
        super().__init__(message)


class Child:
    """A process that answers requests: JSON over a socket. What its code prints goes to a log.

    Args:
        silence_s: How long one answer may take, s.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._connection, self._theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._process: subprocess.Popen[bytes] | Forked

    def _start(self, python: str, *arguments: str, **options: Any) -> None:
        with self._theirs:
            file = self._theirs.fileno()
            self._process = start(
                [python, *_WORKER, str(os.getpid()), str(file), *arguments],
                pass_fds=[file],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                **options,
            )

    def send(self, **request: Any) -> None:
        """Send a request, without waiting for the answer."""
        with self._watched():
            self._connection.send_bytes(json.dumps(request).encode())

    def receive(self) -> Any:
        """Return the answer to a request.

        Raises:
            VersionDied: The process ended, or did not answer in time.
        """
        if not self._connection.poll(self.silence_s):
            message = f"no answer for {self.silence_s:.0f} s; raise --timeout or shrink the case"
            raise VersionDied(self, message)
        with self._watched():
            return json.loads(self._connection.recv_bytes())

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError):  # it has ended
            self._log.seek(0)
            printed = self._log.read().decode(errors="replace")
            raise VersionDied(self, describe_exit(self._process.wait(), printed)) from None

    def ask(self, **request: Any) -> Any:
        """Send a request and return its answer."""
        self.send(**request)
        return self.receive()

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(BadInput):  # the process that it was forked from is gone too
            kill_tree(self._process.pid)
            self._process.wait()
        self._connection.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkServer(Child):
    """A process that has imported what versions import from elsewhere. A fork of it takes hundredths of a second.

    Both versions of a pair come from one, so that its position in memory affects both equally.

    Args:
        silence_s: How long an import may take, s.
    """

    def __init__(self, silence_s: float) -> None:
        super().__init__(silence_s)
        path = os.pathsep.join(named_folders(absolute=True))  # the others are in the versions
        self._start(sys.executable, "--forks", env=BOUND | os.environ | {"PYTHONPATH": path})

    def imports(self, modules: Sequence[str], own: Sequence[str]) -> list[str]:
        """Import modules for all processes that are forked from now on.

        Args:
            modules: Their names. A module that cannot be imported is left to the version that needs it.
            own: Modules that belong to the versions, which must not come from elsewhere.

        Returns:
            The environment variables that the imports set.
        """
        return self._answer({"modules": list(modules), "own": list(own)})

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> Forked:
        """Fork a version, with the files of its connection and its log."""
        return Forked(self, self._answer(request, files))

    def wait(self, pid: int) -> int:
        """Return how a child ended, as `subprocess` does."""
        return self._answer({"wait": pid})

    def _answer(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        try:
            self.send(**request)
            with self._watched():
                for file in files:
                    reduction.send_handle(self._connection, file, self._process.pid)
            return self.receive()
        except BaseException as error:
            # Also after Ctrl-C, because the next answer would belong to this request.
            self._process.kill()
            if isinstance(error, VersionDied):
                message = f"the process that both versions are forked from: {error}"
                raise BadInput(message) from None
            raise


@dataclass
class Forked:
    """A child of a `ForkServer`, with the part of `subprocess.Popen` that is used."""

    fork_server: ForkServer
    pid: int
    _code: int | None = None

    def wait(self) -> int:
        """Return how it ended; a process can be waited for only once."""
        if self._code is None:
            self._code = self.fork_server.wait(self.pid)
        return self._code


class VersionProcess(Child):
    """A version in a process of its own.

    Args:
        version: The version.
        silence_s: How long one answer may take, s.
        fork_server: The process from which it is forked; None starts a new interpreter.
        bound: Whether OpenMP's threads are bound to cores in a new interpreter, unless the user's environment says otherwise.
    """

    def __init__(
        self,
        version: Version,
        silence_s: float,
        fork_server: ForkServer | None = None,
        *,
        bound: bool = False,
    ) -> None:
        super().__init__(silence_s)
        self.version, self.is_forked, self._is_halted = version, fork_server is not None, False
        # Its rows come to us, and its files are thrown away.
        self._output = tempfile.TemporaryDirectory(prefix="nanolib-side-")
        folder, variables = version.start_folder, {OUTPUT_VARIABLE: self._output.name}
        if fork_server is None:
            variables = (BOUND if bound else {}) | os.environ | variables
            self._start(version.python, *version.import_folders, cwd=folder, env=variables)
            return
        variables["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        request = {"folder": str(folder), "environment": variables}
        with self._theirs:
            self._process = fork_server.fork(
                request | {"imports": version.import_folders},
                [self._theirs.fileno(), self._log.fileno()],
            )

    def send(self, **request: Any) -> None:
        """Send a request, without waiting for the answer."""
        if self._is_halted:
            self._signal(signal.SIGCONT)
        self._is_halted = False
        super().send(**request)

    def receive(self) -> Any:
        """Return the answer to a request.

        Raises:
            BadInput: This version cannot serve the request.
            VersionDied: The process ended, or did not answer in time.
        """
        answer = super().receive()
        if "refused" in answer:
            raise BadInput(f"{self.version.title}: {answer['refused']}")
        return answer

    def time_block(self, calls: int, *, keep: bool) -> list[list[float]]:
        """Time a block: ms of each call and phase.

        The process is halted until its next request, because OpenMP's threads look for more work for ten milliseconds. If this
        process dies in the meantime, the system ends the halted one.

        Raises:
            VersionDied: As `receive`, or the code that was timed raised.
        """
        answer = self.ask(do="block", calls=calls, keep=keep)
        self._signal(signal.SIGSTOP)
        self._is_halted = True
        if "ms" not in answer:
            message = answer.get("message", "it ended in the middle of its timing")
            raise VersionDied(self, message, answer["ended"])
        return answer["ms"]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End the process and all that it started."""
        super().close()
        self._output.cleanup()
