"""The process that versions are forked from: it has imported what they import from elsewhere."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nanolib.ab.worktree import named_folders
from nanolib.measurement import BadInput
from nanolib.run.process import describe_exit, kill_tree, start

# Each of OpenMP's threads keeps to a core of its own: left free, two are at times put on one, and a process takes 30 ms for what
# another does in 18, all its life long.
BOUND = {"OMP_PROC_BIND": "true"}

WORKER = ["-P", "-W", "ignore", str(Path(__file__).with_name("worker.py"))]  # after the interpreter
CHUNK = 1 << 16  # bytes of an answer, read at once


class ForkServer:
    """A process that has imported what versions import from elsewhere: they are forked from it in hundredths of a second.

    Both versions of a pair come from one, so that how it lies in memory moves them alike.

    Args:
        silence_s: How long an import may take.
    """

    def __init__(self, silence_s: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(silence_s)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        absolute = named_folders(absolute=True)  # others are within the versions
        with theirs:
            self._process = start(
                [sys.executable, *WORKER, str(os.getpid()), "--forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=BOUND | os.environ | {"PYTHONPATH": os.pathsep.join(absolute)},
            )

    def imports(self, modules: Sequence[str], own: Sequence[str] = ()) -> list[str]:
        """Import what will be forked from now on has imported already.

        Args:
            modules: Names; what cannot be imported is left to who needs it.
            own: What versions have of their own, which must not come from elsewhere.

        Returns:
            The variables of the environment that the imports set.
        """
        return self._ask({"modules": list(modules), "own": list(own)})

    def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> Forked:
        """A child of it, which reads from, answers to and logs in three files."""
        return Forked(self, self._ask(request, files))

    def wait(self, pid: int) -> int:
        """How a child ended, as `subprocess` would tell it."""
        return self._ask({"wait": pid})

    def _ask(self, request: Mapping[str, Any], files: Sequence[int] = ()) -> Any:
        """What it answers; it is ended when it does not, and when we are interrupted, or the next answer would be of this.

        Raises:
            BadInput: It has ended, or says nothing.
        """
        text, answer = json.dumps(request).encode() + b"\n", b""
        try:
            sent = socket.send_fds(self._socket, [text], files)
            self._socket.sendall(text[sent:])
            while not answer.endswith(b"\n"):
                answer += (chunk := self._socket.recv(CHUNK))
                if not chunk:
                    raise ConnectionError("it has hung up")
        except ConnectionError:
            failure = describe_exit(self._process.wait(), said_in(self._log))
        except BaseException as error:
            self._process.kill()
            if not isinstance(error, OSError):
                raise
            failure = str(error)
        else:
            return json.loads(answer)
        raise BadInput(f"the process that both versions are forked from: {failure}")

    def close(self) -> None:
        """End it and all that its imports started; its children are ended by who asked for them."""
        kill_tree(self._process.pid)
        self._process.wait()
        self._socket.close()
        self._log.close()


def said_in(log: BinaryIO) -> str:
    """All that a process has said."""
    log.seek(0)
    return log.read().decode(errors="replace")


@dataclass
class Forked:
    """A child of a `ForkServer`, as `subprocess.Popen` would be one of ours."""

    fork_server: ForkServer
    pid: int
    _code: int | None = None

    def wait(self) -> int:
        """How it ended; it is not waited for twice."""
        if self._code is None:
            self._code = self.fork_server.wait(self.pid)
        return self._code
