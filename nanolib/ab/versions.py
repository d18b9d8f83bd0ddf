"""Check out versions of the code, and inspect the interpreters that run the versions.

nanolib creates a temporary worktree for each git revision, and removes the worktree at the end of
the comparison.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nanolib.measurement import BadInput, quote
from nanolib.paths import expand_home, git, revision_of

WORKING_TREE = "."


@dataclass(frozen=True)
class Version:
    """A git revision or a working tree, with the interpreter that runs the code.

    Attributes:
        name: Name of the revision as the user gave it.
        revision: Hash of the commit. A `+` at the end marks a working tree with changes.
        root: Folder of the version's files.
        folder: Folder in which the user started the command, relative to the repository.
        top: Top folder of the user's repository.
        python: Path of the interpreter that runs the version.
    """

    name: str
    revision: str
    root: Path
    folder: Path
    top: Path
    python: str = sys.executable

    @property
    def title(self) -> str:
        """Return the version's name for messages."""
        interpreter = "" if self.is_here else f" with {self.python}"
        return f"{self.name} ({self.revision}){interpreter}"

    @property
    def is_here(self) -> bool:
        """Whether the interpreter of this process also runs the version."""
        return self.python == sys.executable

    @property
    def start_folder(self) -> Path:
        """Return the folder in which the version's processes start.

        This is the folder in which the user started `nano ab`, or the root of the version if the
        version does not have that folder.
        """
        folder = self.root / self.folder
        return folder if folder.is_dir() else self.root

    def edits(self) -> str:
        """Return how the tracked files of a working tree differ from its commit.

        The result is empty for a revision, because its files do not change. Without a commit, git
        knows no file to compare, and the result is empty too.
        """
        commit = self.revision.removesuffix("+")
        is_known = self.name == WORKING_TREE and commit
        return git(self.root, "diff", "--no-ext-diff", commit) if is_known else ""

    @property
    def import_folders(self) -> list[str]:
        """Return the folders with the version's own modules, the root of the repository first."""
        folders = [self.root, self.root / "src", self.root / self.folder]
        # PYTHONPATH and editable installs may name folders of the working tree.
        named = [Path(name).resolve() for name in sys.path if not name.startswith(sys.prefix)]
        inside = [folder for folder in named if folder.is_relative_to(self.top)]
        folders += [self.root / folder.relative_to(self.top) for folder in inside]
        return list(dict.fromkeys(str(folder) for folder in folders))


@contextmanager
def checked_out(names: Sequence[str], start: Path) -> Iterator[list[Version]]:
    """Check out versions of the code within the context.

    Args:
        names: Git revisions, or `.` for the working tree.
        start: A folder inside the repository.

    Raises:
        BadInput: A name is not a commit, or `start` is not in a git repository.
    """
    top = Path(git(start, "rev-parse", "--show-toplevel"))
    folder = Path(git(start, "rev-parse", "--show-prefix"))
    commits = {name: _commit(top, name) for name in names if name != WORKING_TREE}
    versions = {WORKING_TREE: Version(WORKING_TREE, revision_of(top) or "+", top, folder, top)}
    git(top, "worktree", "prune")  # A killed comparison leaves records of its worktrees.
    try:
        with TemporaryDirectory(prefix="nanolib-ab-") as made:
            for name, commit in commits.items():
                place = Path(made) / commit[:12]
                versions[name] = Version(name, commit[:12], place, folder, top)
                if not place.exists():  # Two names may refer to the same commit.
                    # The repository's own hooks must not run.
                    add = ("-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach")
                    git(top, *add, "--quiet", str(place), commit)
                    git(place, "submodule", "update", "--init", "--quiet")
            yield [versions[name] for name in names]
    finally:
        with contextlib.suppress(BadInput):  # A later git command also removes the records.
            git(top, "worktree", "prune")


def _commit(top: Path, name: str) -> str:
    find = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    try:
        return git(top, *find, f"{name}^{{commit}}")
    except BadInput:
        raise BadInput(
            f"revision: {name!r} is not a commit of {top.name}; "
            "give a commit, a branch, a tag or . for the working tree"
        ) from None


# If several folders contain a package, Python imports the first one, so that version counts.
_LIST_PACKAGES = """
import importlib.metadata as m, json, platform, sys
found = {'python': platform.python_version()}
for d in m.distributions():
    name = d.metadata['Name']
    if name: found.setdefault(name.lower().replace('_', '-'), d.version)
print(json.dumps([sys.executable, found]))
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


HERE = Interpreter(sys.executable, {})  # Its packages are not listed, because none differs.


def inspect_interpreter(python: str) -> Interpreter:
    """List the packages of an interpreter.

    Args:
        python: Path of the interpreter, or the name of a program in PATH.

    Raises:
        BadInput: The program is not a Python interpreter, or its version is below 3.11.
    """
    # With -P, Python imports no file such as json.py from the working folder. Python 3.10 and
    # older versions do not know -P, and could not run `worker.py` either.
    try:
        done = subprocess.run(
            [expand_home(python), "-P", "-c", _LIST_PACKAGES],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return Interpreter(*json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        raise BadInput(
            f"--python: {quote(python)} does not run Python 3.11 or newer; "
            "name an interpreter, such as .venv/bin/python"
        ) from None
