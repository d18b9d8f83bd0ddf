"""Start pairs of processes, one process per version, and fork later pairs to save time."""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from nanolib.ab.children import ForkServer, VersionDied, VersionProcess
from nanolib.ab.versions import Version

# Number of process pairs that each server forks. The position of a server in memory affects all
# forks of the server, so a comparison needs several servers. Each server takes seconds to start.
CHILDREN = 9


class Processes(AbstractContextManager):
    """One process for each version. `renew` replaces the processes.

    The first processes are new interpreters, which take seconds to start. A server imports the
    modules that all versions share, and forks the next processes in hundredths of a second.

    Args:
        versions: The versions to run.
        silence_s: Time limit for one answer of a process, s.
        fork: Whether a server may fork the later processes.
        bound: Whether new interpreters bind OpenMP's threads to cores.
        log: Function that receives a message if the versions' code prevents forks.
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
        self._modules: list[str] = []  # Modules that all versions share.
        self._fork_server: ForkServer | None = None
        self._forked = 0

    def renew(self) -> list[VersionProcess]:
        """End the processes and start fresh processes.

        Raises:
            BadInput: The fork server failed.
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
        """Find the external modules that all versions import, and import them in a server.

        Code may set an environment variable before it imports a module that reads the variable. In
        a fork, the server has already imported the module. nanolib therefore forks only code that
        sets no variables, apart from variables that the imports themselves set.
        """
        try:
            answers = [process.ask(do="imports") for process in self.processes]
        except VersionDied:  # `renew` asks the next pair of processes again.
            return
        in_all = set.intersection(*(set(answer["modules"]) for answer in answers))
        self._modules = [name for name in answers[0]["modules"] if name in in_all]
        by_imports = self._renew_fork_server()
        if {name for answer in answers for name in answer["variables"]} - set(by_imports):
            self._log(
                "the code sets environment variables, so each process imports all modules again; "
                "raise --budget to measure more pairs of processes"
            )
            self._end_fork_server()
            self._fork, self._modules = False, []

    def _renew_fork_server(self) -> list[str]:
        """Start another server, and return the environment variables that its imports set."""
        self._end_fork_server()
        self._fork_server, self._forked = ForkServer(self._silence_s), 0
        return self._fork_server.imports(self._modules, self._own)

    def end(self) -> None:
        """End the process of each version."""
        # Each process must end, even if closing the other process raises an exception.
        with contextlib.ExitStack() as stack:
            for process in self.processes:
                stack.callback(process.close)
            self.processes = []

    def _end_fork_server(self) -> None:
        if self._fork_server:
            self._fork_server.close()
        self._fork_server = None

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self._end_fork_server()
