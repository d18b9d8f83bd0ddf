"""A pair of processes, one per version, and how fresh ones are made fast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Self

from nanolib.ab.children import ForkServer, VersionDied, VersionProcess
from nanolib.ab.versions import Version

# How many pairs of processes are forked from one. The position of that one in memory is an effect of its own on all of them, and
# to start another one takes seconds.
CHILDREN = 9


class Processes:
    """A process per version; `renew` gives each a fresh one.

    The first ones are new interpreters, which takes seconds. Then a process imports once what all versions import from elsewhere,
    and the next ones are forked from it, which takes hundredths of a second.

    Args:
        versions: The versions.
        silence_s: As in `VersionProcess`.
        fork: Whether processes may be forked.
        bound: As in `VersionProcess`.
        log: Receives a line if the code does not allow forking.
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
        self._modules: list[str] = []  # that all import from elsewhere; empty until known
        self._fork_server: ForkServer | None = None
        self._forked = 0

    def renew(self) -> list[VersionProcess]:
        """Start fresh processes.

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

        Code that sets environment variables does so before it imports what reads them, so it must import by itself. Variables that
        the imports themselves set do not matter.
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
                "the code sets environment variables, so each process imports everything again: "
                "expect fewer pairs of processes, or raise --budget"
            )
            self._end_fork_server()
            self._fork, self._modules = False, []

    def _renew_fork_server(self) -> list[str]:
        """Start another process to fork from; return the variables that its imports set."""
        self._end_fork_server()
        self._fork_server, self._forked = ForkServer(self._silence_s), 0
        return self._fork_server.imports(self._modules, self._own)

    def end(self) -> None:
        """End all versions."""
        with contextlib.ExitStack() as stack:  # each, even if one cannot be ended
            for process in self.processes:
                stack.callback(process.close)
            self.processes = []

    def _end_fork_server(self) -> None:
        if self._fork_server:
            self._fork_server.close()
        self._fork_server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._end_fork_server()
