"""Versions of the code, and the interpreters that run them.

Each revision has a worktree of its own, which is removed when the block ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded

WORKING_TREE = "."


@dataclass(frozen=True)
class Version:
    """One state of the code.

    Attributes:
        name: What the user called it.
        revision: The commit; with `+` at the end if it is a working tree that differs from it.
        root: Where its files are.
        folder: Inside the repository, the folder from which the command was given.
        python: The interpreter that runs it.
        environment: How its packages differ from the other version's; empty if one interpreter runs both.
    """

    name: str
    revision: str
    root: Path
    folder: Path
    python: str = sys.executable
    environment: str = ""

    @property
    def title(self) -> str:
        """Its name for people."""
        revision = f" ({self.revision})" if self.revision else ""
        environment = f" with {self.environment}" if self.environment else ""
        return f"{self.name}{revision}{environment}"

    @property
    def start_folder(self) -> Path:
        """Where its processes start: the user's folder, or the root if this revision does not have that folder."""
        folder = self.root / self.folder
        return folder if folder.is_dir() else self.root

    def written(self) -> dict[Path, int]:
        """Return when each Python file of a working tree was written, ns; nobody edits the files of a revision."""
        if self.name != WORKING_TREE:
            return {}
        if self.revision:
            tracked_and_new = ("--cached", "--others", "--exclude-standard", "--", "*.py")
            listed = _git(self.root, "ls-files", "-z", *tracked_and_new).split("\0")
            files = [self.root / name for name in listed if name]
        else:  # a folder without a repository
            files = [*self.root.glob("*.py"), *self.root.glob("*/*.py")]
        return {file: file.stat().st_mtime_ns for file in files if file.is_file()}

    @property
    def import_folders(self) -> list[str]:
        """The folders that its own code is imported from, the root of the repository first."""
        relative = [self.root / self.folder / name for name in named_folders(absolute=False)]
        folders = [self.root, self.root / "src", self.root / self.folder, *relative]
        return list(dict.fromkeys(str(folder) for folder in folders))

    @property
    def own_modules(self) -> list[str]:
        """The top-level modules that can be imported from there."""
        folders = [Path(folder) for folder in self.import_folders]
        packages = [file.parent.name for folder in folders for file in folder.glob("*/__init__.py")]
        return packages + [file.stem for folder in folders for file in folder.glob("*.py")]


def named_folders(*, absolute: bool) -> list[str]:
    """Return the folders in `PYTHONPATH`: those of the machine, or those relative to the folder in which a process starts."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [name for name in named if Path(name).is_absolute() == absolute]


@contextmanager
def checked_out(names: Sequence[str], start: Path) -> Iterator[list[Version]]:
    """Check out versions of the code.

    Args:
        names: Git revisions, or `.` for the working tree.
        start: A folder inside the repository.

    Raises:
        BadInput: No repository for a name other than `.`, or a name that is not a commit; nothing was made then.
    """
    try:
        top = Path(_git(start, "rev-parse", "--show-toplevel"))
    except BadInput:
        if set(names) != {WORKING_TREE}:
            raise BadInput(f"{start} is in no git repository; run nano ab inside one") from None
        yield [Version(name, "", start, Path()) for name in names]
        return
    folder = Path(_git(start, "rev-parse", "--show-prefix"))
    commits = {name: _commit(top, name) for name in names if name != WORKING_TREE}
    with _ended_by_signal(), _pruned(top), TemporaryDirectory(prefix="nanolib-ab-") as made:
        versions = {WORKING_TREE: Version(WORKING_TREE, _revision(top), top, folder)}
        for name, commit in commits.items():
            place = Path(made) / commit[:12]
            versions[name] = Version(name, commit[:12], place, folder)
            if not place.exists():  # no hook of the repository may run
                quiet = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
                _git(top, *quiet, "worktree", "add", "--detach", "--quiet", str(place), commit)
        yield [versions[name] for name in names]


@contextmanager
def _pruned(top: Path) -> Iterator[None]:
    """Have git forget worktrees whose files are gone, before the block and after it."""
    _git(top, "worktree", "prune")
    try:
        yield
    finally:
        with contextlib.suppress(BadInput):  # git forgets them later by itself
            _git(top, "worktree", "prune")


def _commit(top: Path, name: str) -> str:
    wrong = f"revision: {name!r} is not a commit of {top.name}; give a commit, a branch, a tag or . for the working tree"
    if name.startswith("-"):
        raise BadInput(wrong)
    find = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    return _git(top, *find, f"{name}^{{commit}}", complaint=wrong)


def _revision(top: Path) -> str:
    try:
        return _git(top, "describe", "--always", "--dirty=+", "--exclude=*")
    except BadInput:  # a repository without a commit
        return "+"


def _git(folder: Path, *arguments: str, complaint: str = "") -> str:
    """Return what git prints.

    Raises:
        BadInput: Git is missing or fails; `complaint`, or its own last line.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise BadInput("git: it is not installed; nano ab needs it") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(complaint or f"git {arguments[0]}: {last}")
    return done.stdout.strip()


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Let a termination or a hang-up end the command like Ctrl-C, so that everything is cleared away."""

    def end(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python sets no handlers in others
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


OLDEST = (3, 11)  # that runs `worker.py`
_MOST_NAMED = 3  # differences in a version's title
_TIMEOUT_S = 60
# If a package is in two folders, the first one is imported.
_LIST_PACKAGES = """
import importlib.metadata as m, json, sys
found = {}
for d in m.distributions():
    name = d.metadata['Name']
    if name: found.setdefault(name.lower().replace('_', '-'), d.version)
print(json.dumps({'python': list(sys.version_info[:3]), 'packages': found}))
"""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter and what it can import.

    Attributes:
        python: The interpreter.
        packages: Name, in lower case → version; `python` is one of them.
    """

    python: str
    packages: Mapping[str, str]


def inspect_interpreter(python: str) -> Interpreter:
    """List the packages of an interpreter.

    Args:
        python: Its path, or a name to be found on the path.

    Raises:
        BadInput: It is not an interpreter, or too old.
    """
    found = shutil.which(expanded(python))
    if not found:
        raise BadInput(
            f"--python: {shown(python)} is not a program; name an interpreter, such as .venv/bin/python"
        )
    found = str(Path(found).absolute())  # not resolved: its own path leads to its environment
    try:
        done = subprocess.run(
            [found, "-c", _LIST_PACKAGES],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            # a json.py of the working folder must not be imported
            env=os.environ | {"PYTHONSAFEPATH": "1"},
        )
        answer = json.loads(done.stdout.splitlines()[-1])
        version = tuple(answer["python"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        raise BadInput(
            f"--python: {shown(python)} does not run Python; name an interpreter"
        ) from None
    number, oldest = (".".join(map(str, one)) for one in (version, OLDEST))
    if version < OLDEST:
        raise BadInput(f"--python: {shown(python)} is Python {number}; give {oldest} or newer")
    return Interpreter(found, answer["packages"] | {"python": number})


def differences(a: Interpreter, b: Interpreter) -> list[tuple[str, str, str]]:
    """List what differs: name, version in A and version in B; `none` if one lacks it."""
    names = sorted({**a.packages, **b.packages}, key=lambda name: (name != "python", name))
    pairs = [(name, a.packages.get(name, "none"), b.packages.get(name, "none")) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def titles(a: Interpreter, b: Interpreter) -> tuple[str, str]:
    """Name each by how it differs from the other, briefly: `numpy 1.26.4`."""
    differ = differences(a, b)
    if not differ:
        return "the first interpreter", "the second interpreter"
    rest = len(differ) - _MOST_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    of_a = ", ".join(f"{name} {version}" for name, version, _ in differ[:_MOST_NAMED])
    of_b = ", ".join(f"{name} {version}" for name, _, version in differ[:_MOST_NAMED])
    return of_a + more, of_b + more
