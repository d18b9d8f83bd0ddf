"""Versions of the code: each revision in a worktree of its own, which goes when the block ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from nanolib.measurement import BadInput

WORKING_TREE = "."


@dataclass(frozen=True)
class Version:
    """One state of the code.

    Attributes:
        name: What the user called it.
        revision: The commit; with `+` at the end when it is a working tree that differs from it.
        root: Where its files are.
        folder: Inside the repository, the folder from which the command was given.
        python: The interpreter that runs it.
        environment: What tells that one's packages from the other version's; empty where one interpreter runs both.
    """

    name: str
    revision: str
    root: Path
    folder: Path
    python: str = sys.executable
    environment: str = ""

    @property
    def called(self) -> str:
        """It, for people who know what they asked for."""
        return f"{self.name} with {self.environment}" if self.environment else self.name

    @property
    def title(self) -> str:
        """It, for people."""
        return (f"{self.name} ({self.revision})" if self.revision else self.name) + (
            f" with {self.environment}" if self.environment else ""
        )

    def python_files(self) -> list[Path]:
        """The Python files of a working tree, which its owner may edit meanwhile; a revision's are out of everyone's way."""
        if self.name != WORKING_TREE:
            return []
        if not self.revision:  # a folder without a repository
            return [*self.root.glob("*.py"), *self.root.glob("*/*.py")]
        listed = _git(
            self.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"
        )
        return [
            file for name in listed.split("\0") if name and (file := self.root / name).is_file()
        ]

    @property
    def import_folders(self) -> list[str]:
        """What its own code is imported from, the repository's root first."""
        relative = [self.root / self.folder / name for name in named_folders(absolute=False)]
        folders = [self.root, self.root / "src", self.root / self.folder, *relative]
        return list(dict.fromkeys(str(folder) for folder in folders))

    @property
    def own_modules(self) -> list[str]:
        """What can be imported from there, at the top."""
        folders = [Path(folder) for folder in self.import_folders]
        packages = [file.parent.name for folder in folders for file in folder.glob("*/__init__.py")]
        return packages + [file.stem for folder in folders for file in folder.glob("*.py")]


def named_folders(*, absolute: bool) -> list[str]:
    """What `PYTHONPATH` names: folders of the machine, or those within whatever folder a process begins in."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [name for name in named if Path(name).is_absolute() == absolute]


@contextmanager
def checked_out(names: Sequence[str], start: Path) -> Iterator[list[Version]]:
    """The versions that some names stand for, each with its files.

    Args:
        names: Git revisions, or `.` for the working tree.
        start: A folder inside the repository.

    Raises:
        BadInput: No repository for a name other than `.`, or a name that stands for no commit; nothing was made then.
    """
    try:
        top = Path(_git(start, "rev-parse", "--show-toplevel"))
    except BadInput:
        if any(name != WORKING_TREE for name in names):
            raise BadInput(f"{start} is in no git repository; run nano ab inside one") from None
        yield [Version(name, "", start, Path()) for name in names]
        return
    folder = Path(_git(start, "rev-parse", "--show-prefix"))
    commits = [_commit(top, name) for name in names]
    with _ended_by_signal(), TemporaryDirectory(prefix="nanolib-ab-") as made:
        _git(top, "worktree", "prune")
        places: dict[str, Path] = {}
        try:
            for name, commit in zip(names, commits, strict=True):
                if name != WORKING_TREE and commit not in places:
                    places[commit] = Path(made) / commit[:12]
                    _add(top, places[commit], commit)
            yield [
                Version(name, _revision(top), top, folder)
                if name == WORKING_TREE
                else Version(name, commit[:12], places[commit], folder)
                for name, commit in zip(names, commits, strict=True)
            ]
        finally:
            for place in places.values():
                _remove(top, place)


def _commit(top: Path, name: str) -> str:
    if name == WORKING_TREE:
        return WORKING_TREE
    wrong = f"revision: {name!r} is no commit of {top.name}; give a commit, a branch, a tag or . for the working tree"
    if name.startswith("-"):
        raise BadInput(wrong)
    return _git(
        top,
        "rev-parse",
        "--verify",
        "--quiet",
        "--end-of-options",
        f"{name}^{{commit}}",
        complaint=wrong,
    )


def _revision(top: Path) -> str:
    try:
        return _git(top, "describe", "--always", "--dirty=+", "--exclude=*")
    except BadInput:  # a repository without a commit
        return "+"


def _git(folder: Path, *arguments: str, complaint: str = "") -> str:
    """What git prints.

    Raises:
        BadInput: Git is missing or fails; `complaint`, or its own last words.
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


def _add(top: Path, place: Path, commit: str) -> None:
    quiet = (
        "-c",
        "core.hooksPath=/dev/null",
        "-c",
        "advice.detachedHead=false",
    )  # no hook of the repository's may run
    _git(top, *quiet, "worktree", "add", "--detach", "--quiet", str(place), commit)


def _remove(top: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    with contextlib.suppress(
        BadInput
    ):  # what matters is that the files are gone; git forgets the rest by itself
        _git(top, "worktree", "prune")


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """A termination or a hang-up unwinds like Ctrl-C, so that everything is cleared away."""

    def end(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    main = (
        threading.current_thread() is threading.main_thread()
    )  # elsewhere Python sets no handlers
    watched = [
        n
        for n in (signal.SIGTERM, signal.SIGHUP)
        if main and signal.getsignal(n) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, end) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
