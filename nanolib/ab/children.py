"""Start processes that run `worker.py`, and send requests to these processes.

A `VersionProcess` runs one version. A `ForkServer` forks the processes of versions.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing import Pipe, reduction
from pathlib import Path
from typing import Any

from nanolib.ab.versions import Version
from nanolib.measurement import BadInput, Status
from nanolib.paths import OUTPUT_VARIABLE
from nanolib.run.process import describe_exit, kill_tree

# OpenMP must bind each of its threads to a core. Otherwise, two threads may share a core for as
# long as the process runs. The same work then takes 30 ms instead of 18 ms.
BOUND = {"OMP_PROC_BIND": "true"}
ANSWER_S = 900.0  # Time limit for an answer that is not a block.
_WORKER = ("-P", "-W", "ignore", str(Path(__file__).with_name("worker.py")))


class VersionDied(RuntimeError):
    """A process ended or did not answer, or the timed code raised an exception.

    Args:
        process: The process that failed.
        message: How the process failed, in one line.
        status: The status of the case that the process was running.
    """

    def __init__(self, process: "Child", message: str, status: str = Status.ERROR):
        self.process, self.status = process, status
        super().__init__(message)


class Child(AbstractContextManager):
    """A process that answers JSON requests over a socket, and writes its output to a log."""

    def __init__(self):
        self._connection, self._theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process

    def _start(self, python: str, *arguments: str, **options):
        with self._theirs:
            file = self._theirs.fileno()
            process = subprocess.Popen(
                [python, *_WORKER, str(os.getpid()), str(file), *arguments],
                pass_fds=[file],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C must not reach the process.
                **options,
            )
        self._pid, self._wait = process.pid, process.wait

    def send(self, **request) -> None:
        """Send a request, without waiting for the answer."""
        with self._report_death():
            self._connection.send_bytes(json.dumps(request).encode())

    def receive(self, limit_s: float = ANSWER_S):
        """Return the answer to a request.

        Args:
            limit_s: Time limit, s.

        Raises:
            VersionDied: The process ended, or did not answer in time.
        """
        if not self._connection.poll(limit_s):
            raise VersionDied(
                self, f"no answer for {limit_s:.0f} s; shrink the case or raise --budget"
            )
        with self._report_death():
            return json.loads(self._connection.recv_bytes())

    @contextlib.contextmanager
    def _report_death(self) -> Iterator[None]:
        """Turn a closed connection into `VersionDied`, with the end of the log."""
        try:
            yield
        except (EOFError, ConnectionError):
            self._log.seek(0)
            printed = self._log.read().decode(errors="replace")
            raise VersionDied(self, describe_exit(self._wait(), printed)) from None

    def ask(self, **request):
        """Send a request and return its answer."""
        self.send(**request)
        return self.receive()

    def close(self) -> None:
        """End the process and all its children."""
        # A fork server that died cannot return the exit code of its fork.
        with contextlib.suppress(BadInput):
            kill_tree(self._pid)
            self._wait()
        self._connection.close()
        self._log.close()

    def __exit__(self, *_):
        self.close()


class ForkServer(Child):
    """A process that imports the modules that all versions share, and forks other processes.

    A forked process starts in tens of milliseconds. Both versions of a pair are forked from the
    same server, so the position of the server in memory affects both versions equally.

    Args:
        modules: Modules to import before the first fork.
        folders: Folders with the versions' own modules.

    Attributes:
        forks: Number of pairs that the server has forked.
        imported: Variables that the imports have set, and imported modules of the folders.
    """

    def __init__(self, modules: Sequence[str] = (), folders: Sequence[str] = ()):
        super().__init__()
        # Relative folders belong to a version, so the server must not import modules from them.
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        absolute = os.pathsep.join(filter(os.path.isabs, path))
        self._start(sys.executable, "--forks", env=BOUND | os.environ | {"PYTHONPATH": absolute})
        self.modules, self.forks = modules, 0
        self.imported = self.answer({"modules": [*modules], "folders": [*folders]})

    def answer(self, request: dict[str, Any], files: Sequence[int] = ()):
        """Return the server's answer to a request of `forks.serve`.

        Args:
            request: Modules to import, the process ID of a fork to wait for, or a version to fork.
            files: File descriptors of the connection and the log of a version to fork.

        Raises:
            BadInput: The server ended.
        """
        try:
            self.send(**request)
            with self._report_death():
                for file in files:
                    reduction.send_handle(self._connection, file, self._pid)
            return self.receive()
        except VersionDied as error:
            raise BadInput(f"fork server of both versions: {error}") from None


class VersionProcess(Child):
    """A process that runs one version.

    Args:
        version: The version to run.
        fork_server: The server that forks this process, or None for a new interpreter.
        bound: Whether a new interpreter binds OpenMP's threads to cores. An OMP_PROC_BIND in the
            user's environment has priority.

    Attributes:
        block_s: Time limit for one block, s.
    """

    block_s = ANSWER_S

    def __init__(
        self, version: Version, fork_server: ForkServer | None = None, *, bound: bool = False
    ):
        super().__init__()
        self.version, self.is_forked = version, fork_server is not None
        self.calls = 0  # Number of calls in the last block.
        # The version's code may write results, which must not reach the user's output folder.
        self._output = tempfile.TemporaryDirectory(prefix="nanolib-side-")
        folder, own = version.start_folder, {OUTPUT_VARIABLE: self._output.name}
        if fork_server is None:
            variables = (BOUND if bound else {}) | os.environ | own
            self._start(version.python, *version.import_folders, cwd=folder, env=variables)
            return
        request = {
            "folder": str(folder),
            "environment": own | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
            "imports": version.import_folders,
        }
        with self._theirs:
            self._pid = fork_server.answer(request, [self._theirs.fileno(), self._log.fileno()])
        # The system reports an exit code only once, so a cache stores the exit code.
        self._wait = functools.cache(functools.partial(fork_server.answer, {"wait": self._pid}))

    def send(self, **request) -> None:
        """Resume the process and send it a request, without waiting for the answer."""
        self._signal(signal.SIGCONT)
        super().send(**request)

    def receive(self, limit_s: float = ANSWER_S):
        """Return the answer to a request.

        Args:
            limit_s: Time limit, s.

        Raises:
            BadInput: This version cannot serve the request.
            VersionDied: The process ended, or did not answer in time.
        """
        answer = super().receive(limit_s)
        if "refused" in answer:
            raise BadInput(f"{self.version.title}: {answer['refused']}")
        return answer

    def time_block(self, calls: int, *, keep: bool) -> list[list[float]]:
        """Time a block, then halt the process until its next request.

        OpenMP's idle threads use the cores for ten milliseconds after a block, unless the process
        is halted. If `nano ab` is killed, the system ends the halted process too.

        Args:
            calls: Number of calls in the block.
            keep: Whether the version's own rows include the block.

        Returns:
            Times of each call by phase, ms, shape [calls][phases].

        Raises:
            VersionDied: The process ended or did not answer in time, or the timed code raised an
                exception.
        """
        self.calls = calls
        self.send(do="block", calls=calls, keep=keep)
        answer = self.receive(self.block_s)
        self._signal(signal.SIGSTOP)
        if "ms" not in answer:
            raise VersionDied(self, answer["message"], answer["ended"])
        return answer["ms"]

    def _signal(self, number: signal.Signals):
        with contextlib.suppress(OSError):  # The process may have ended.
            os.killpg(self._pid, number)

    def close(self) -> None:
        """End the process and all its children, and delete its results."""
        super().close()
        self._output.cleanup()
