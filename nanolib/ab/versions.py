"""Check out versions of the code, and inspect the interpreters that run the versions.

nanolib creates a temporary worktree for each git revision, and removes the worktree at the end of
the comparison.
"""

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

from nanolib.compare.findings import differences
from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded, git_environment

WORKING_TREE = "."


@dataclass(frozen=True)
class Version:
    """A git revision or a working tree, with the interpreter that runs the code.

    Attributes:
        name: Name of the revision as the user gave it.
        revision: Hash of the commit. A `+` at the end marks a working tree with changes.
        root: Folder of the version's files.
        folder: Folder in which the user started the command, relative to the repository.
        python: Path of the interpreter that runs the version.
        environment: Packages that differ between the two interpreters, or an empty text.
        top: Top folder of the user's repository.
    """

    name: str
    revision: str
    root: Path
    folder: Path
    python: str = sys.executable
    environment: str = ""
    top: Path = Path()

    @property
    def title(self) -> str:
        """Return the version's name for messages."""
        revision = f" ({self.revision})" if self.revision else ""
        environment = f" with {self.environment}" if self.environment else ""
        return f"{self.name}{revision}{environment}"

    @property
    def start_folder(self) -> Path:
        """Return the folder in which the version's processes start.

        This is the folder in which the user started `nano ab`, or the root of the version if the
        version does not have that folder.
        """
        folder = self.root / self.folder
        return folder if folder.is_dir() else self.root

    def written(self) -> dict[Path, int]:
        """Return the modification time of each Python file of a working tree, ns.

        The files of a revision do not change, so the result for a revision is empty.
        """
        if self.name != WORKING_TREE:
            return {}
        if self.revision:
            tracked_and_new = ("--cached", "--others", "--exclude-standard", "--", "*.py")
            listed = _git(self.root, "ls-files", "-z", *tracked_and_new).split("\0")
            files = [self.root / name for name in listed if name]
        else:  # The folder is outside a git repository.
            files = [*self.root.glob("*.py"), *self.root.glob("*/*.py")]
        return {file: file.stat().st_mtime_ns for file in files if file.is_file()}

    @property
    def import_folders(self) -> list[str]:
        """Return the folders with the version's own modules, the root of the repository first."""
        folders = [self.root, self.root / "src", self.root / self.folder]
        folders += [self.root / self.folder / name for name in named_folders(absolute=False)]
        # PYTHONPATH and editable installs may name folders of the working tree.
        named = [Path(name).resolve() for name in sys.path if not name.startswith(sys.prefix)]
        inside = [folder for folder in named if folder.is_relative_to(self.top)]
        folders += [self.root / folder.relative_to(self.top) for folder in inside]
        return list(dict.fromkeys(str(folder) for folder in folders))

    @property
    def own_modules(self) -> list[str]:
        """Return the names of the version's own top-level modules."""
        folders = [Path(folder) for folder in self.import_folders]
        packages = [file.parent.name for folder in folders for file in folder.glob("*/__init__.py")]
        return packages + [file.stem for folder in folders for file in folder.glob("*.py")]


def named_folders(*, absolute: bool) -> list[str]:
    """Return the absolute folders in `PYTHONPATH`, or those relative to the start folder."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [name for name in named if Path(name).is_absolute() == absolute]


@contextmanager
def checked_out(names: Sequence[str], start: Path) -> Iterator[list[Version]]:
    """Check out versions of the code within the context.

    Args:
        names: Git revisions, or `.` for the working tree.
        start: A folder inside the repository.

    Raises:
        BadInput: A name is not a commit, or `start` is not in a git repository.
    """
    try:
        top = Path(_git(start, "rev-parse", "--show-toplevel"))
    except BadInput as error:
        if "not a git repository" not in str(error):
            raise
        if set(names) != {WORKING_TREE}:
            wrong = f"{start} is not in a git repository; run nano ab inside a repository"
            raise BadInput(wrong) from None
        yield [Version(name, "", start, Path()) for name in names]
        return
    folder = Path(_git(start, "rev-parse", "--show-prefix"))
    commits = {name: _commit(top, name) for name in names if name != WORKING_TREE}
    with _ended_by_signal(), _pruned(top), TemporaryDirectory(prefix="nanolib-ab-") as made:
        versions = {WORKING_TREE: Version(WORKING_TREE, _revision(top), top, folder, top=top)}
        for name, commit in commits.items():
            place = Path(made) / commit[:12]
            versions[name] = Version(name, commit[:12], place, folder, top=top)
            if not place.exists():  # Two names may refer to the same commit.
                # The repository's own hooks must not run.
                quiet = ("-c", "core.hooksPath=/dev/null", "-c", "advice.detachedHead=false")
                _git(top, *quiet, "worktree", "add", "--detach", "--quiet", str(place), commit)
                _add_submodules(top, place)
        yield [versions[name] for name in names]


def _add_submodules(top: Path, place: Path) -> None:
    """Check out the submodules of a worktree from the submodules of the working tree."""
    if not (place / ".gitmodules").exists():
        return
    paths = ("config", "--file", ".gitmodules", "--get-regexp", r"^submodule\..*\.path$")
    local = ["-c", "protocol.file.allow=always"]
    for line in _git(place, *paths).splitlines():
        key, _, path = line.partition(" ")
        local += ["-c", f"{key.removesuffix('path')}url={top / path}"]
    wrong = (
        f"submodules: {place.name} needs commits that {top.name} lacks; run git submodule update"
    )
    _git(place, *local, "submodule", "update", "--init", "--quiet", complaint=wrong)


@contextmanager
def _pruned(top: Path) -> Iterator[None]:
    """Remove git's records of deleted worktrees on entry to the context and on exit."""
    _git(top, "worktree", "prune")
    try:
        yield
    finally:
        with contextlib.suppress(BadInput):  # A later git command also removes the records.
            _git(top, "worktree", "prune")


def _commit(top: Path, name: str) -> str:
    wrong = (
        f"revision: {name!r} is not a commit of {top.name}; "
        "give a commit, a branch, a tag or . for the working tree"
    )
    find = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    return _git(top, *find, f"{name}^{{commit}}", complaint=wrong)


def _revision(top: Path) -> str:
    try:
        return _git(top, "describe", "--always", "--dirty=+", "--exclude=*")
    except BadInput:  # A new repository has no commit.
        return "+"


def _git(folder: Path, *arguments: str, complaint: str = "") -> str:
    """Run git and return its output.

    Args:
        folder: Folder in which git runs.
        arguments: Arguments of git.
        complaint: Message if git fails. By default, the message is the last line that git prints.

    Raises:
        BadInput: Git is not installed, or the command fails.
    """
    how = {"capture_output": True, "text": True, "env": git_environment()}
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], **how, check=False)
    except FileNotFoundError:
        raise BadInput("git: is not installed; install git to use nano ab") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(complaint or f"git {arguments[0]}: {last}")
    return done.stdout.strip()


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C within the context, so that this process cleans up."""

    def end(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {}
    if threading.current_thread() is threading.main_thread():  # Other threads cannot set handlers.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


OLDEST = (3, 11)  # The oldest Python version that can run `worker.py`.
_MOST_NAMED = 3  # Maximum number of packages in a version's title.
_TIMEOUT_S = 60
# If several folders contain a package, Python imports the first one, so that version counts.
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
    """An interpreter and its packages.

    Attributes:
        python: Path of the interpreter.
        packages: Name of each package in lower case → its version. The name `python` means the
            interpreter itself.
    """

    python: str
    packages: Mapping[str, str]


def inspect_interpreter(python: str) -> Interpreter:
    """List the packages of an interpreter.

    Args:
        python: Path of the interpreter, or the name of a program in PATH.

    Raises:
        BadInput: The program is not a Python interpreter, or its version is too old.
    """
    found = shutil.which(expanded(python))
    if not found:
        wrong = f"--python: {shown(python)} is not a program; "
        raise BadInput(f"{wrong}name an interpreter, such as .venv/bin/python")
    # nanolib does not resolve links, because Python finds an environment by the link's folder.
    found = str(Path(found).absolute())
    # Python must not import a file such as json.py from the working folder.
    how = {"env": os.environ | {"PYTHONSAFEPATH": "1"}, "stdin": subprocess.DEVNULL}
    how |= {"capture_output": True, "text": True, "timeout": _TIMEOUT_S}
    try:
        done = subprocess.run([found, "-c", _LIST_PACKAGES], **how, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        version = tuple(answer["python"])
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        message = f"--python: {shown(python)} does not run Python; name an interpreter"
        raise BadInput(message) from None
    number, oldest = (".".join(map(str, one)) for one in (version, OLDEST))
    if version < OLDEST:
        raise BadInput(f"--python: {shown(python)} is Python {number}; give {oldest} or newer")
    return Interpreter(found, answer["packages"] | {"python": number})


def titles(a: Interpreter, b: Interpreter) -> tuple[str, str]:
    """Return a short title for each interpreter, such as `numpy 1.26.4`.

    The title lists packages that differ between the two interpreters.
    """
    differ = differences(a.packages, b.packages)
    if not differ:
        return "the first interpreter", "the second interpreter"
    rest = len(differ) - _MOST_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    of_a = ", ".join(f"{name} {version}" for name, version, _ in differ[:_MOST_NAMED])
    of_b = ", ".join(f"{name} {version}" for name, _, version in differ[:_MOST_NAMED])
    return of_a + more, of_b + more
