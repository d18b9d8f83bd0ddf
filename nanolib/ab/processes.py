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
        fork: Whether a server may fork the later processes.
        bound: Whether the first processes bind OpenMP's threads to cores.
        log: Function that receives a message if the versions' code prevents forks.
    """

    def __init__(
        self,
        versions: Sequence[Version],
        *,
        fork: bool,
        bound: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ):
        self._versions, self._fork, self._bound, self._log = versions, fork, bound, log
        self.processes, self._server = [], None

    def renew(self) -> list[VersionProcess]:
        """End the processes and start fresh processes.

        Raises:
            BadInput: The fork server failed.
        """
        if self._fork and not self._server and self.processes:
            self._learn_modules()
        self.end()
        if self._server and self._server.forks == CHILDREN:
            self._start_server(self._server.modules)
        for version in self._versions:
            self.processes.append(VersionProcess(version, self._server, bound=self._bound))
        if self._server:
            self._server.forks += 1
        return self.processes

    def _learn_modules(self):
        """Find the external modules that all versions import, and import them in a server.

        Code may set an environment variable before it imports a module that reads the variable. In
        a fork, the server has already imported the module. nanolib therefore forks only code that
        sets no variables, apart from variables that the imports themselves set. nanolib does not
        fork code that uses a GPU either.
        """
        try:
            answers = [process.ask(do="imports") for process in self.processes]
        except VersionDied:  # `renew` asks the next pair of processes again.
            return
        in_all = set.intersection(*(set(answer["modules"]) for answer in answers))
        self._start_server([name for name in answers[0]["modules"] if name in in_all])
        imported = self._server.imported
        uses_gpu = any(answer["uses_gpu"] for answer in answers)
        variables = {name for answer in answers for name in answer["variables"]}
        self._bound = not uses_gpu
        if uses_gpu:
            reason = "the code uses a GPU"
        elif variables - set(imported["variables"]):
            reason = "the code sets environment variables"
        elif imported["own"]:
            reason = f"a package imports {imported['own'][0]} of this repository"
        else:
            return
        self._log(
            f"{reason}, so each process imports all modules again; "
            "raise --budget to measure more pairs of processes"
        )
        self._end_server()
        self._fork = False

    def _start_server(self, modules: Sequence[str]):
        self._end_server()
        version = self._versions[0]
        self._server = ForkServer(modules, [*version.import_folders, str(version.top)])

    def _end_server(self):
        if self._server:
            self._server.close()
        self._server = None

    def end(self) -> None:
        """End the process of each version."""
        # Each process must end, even if closing the other process raises an exception.
        with contextlib.ExitStack() as stack:
            for process in self.processes:
                stack.callback(process.close)
            self.processes = []

    def __exit__(self, *_):
        try:
            self.end()
        finally:
            self._end_server()
