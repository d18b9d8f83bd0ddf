"""Find the folders of notebooks, params files and results, write files safely, and ask git."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nanolib.measurement import BadInput

OUTPUT_VARIABLE = "NANOLIB_OUTPUT"
# `nano run` sets this variable to `TOKEN/NAME`, to find the run of a job in the database.
LAUNCH_VARIABLE = "NANOLIB_LAUNCH"
# The number of a command's first process. The CPU time of its descendants belongs to the command.
FIRST_VARIABLE = "NANOLIB_FIRST_PROCESS"
DATABASE = "results.sqlite"
SCENARIOS = "scenarios"  # Folder of `params/` with single runs. The other folders are suites.
# A git hook sets these variables. They make git change the repository and the index of the hook.
_OF_HOOKS = (
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_WORK_TREE",
    "GIT_PREFIX",
    "GIT_COMMON_DIR",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_QUARANTINE_PATH",
)


def find_checkout() -> Path | None:
    """Find the folder with `notebooks/` and `params/`, in a checkout or in a copy of the workbook.

    Returns:
        The nearest folder with both folders, from the working folder upward. Without such a
        folder, the result is the checkout of this package. If this package has no checkout, the
        result is None.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[1]):
        if any(folder.glob("notebooks/*.ipynb")) and (folder / "params" / "quick").is_dir():
            return folder
    return None


def checkout() -> Path:
    """Return the folder with `notebooks/` and `params/`.

    Raises:
        BadInput: No folder with notebooks and params files was found.
    """
    if found := find_checkout():
        return found
    raise BadInput(
        "notebooks: this folder and its parents have no notebooks/ and params/; run "
        "`nano init DIR`, and start nano in DIR"
    )


def params_files() -> dict[str, dict[str, Path]]:
    """Map each folder of `params/` to the params files of its notebooks, by name.

    The file of the summary is last, because the summary reads all results.
    """
    found = {}
    notebooks = {file.stem for file in (checkout() / "notebooks").glob("*.ipynb")}
    files = (checkout() / "params").glob("[!.]*/*.yml")
    for file in sorted(files, key=lambda file: (file.stem == "summary", file)):
        if notebook_of(file) in notebooks:
            found.setdefault(file.parent.name, {})[file.stem] = file
    return found


def notebook_of(file: Path) -> str:
    """Return the notebook of a params file. The name of a scenario begins with its notebook."""
    return file.stem.partition("-")[0]


def installed_workbook() -> Path:
    """Return the folder with the notebooks and params files of this nanolib.

    A wheel contains the files in `nanolib/workbook`. In a checkout, the files are next to the
    package.
    """
    inside = Path(__file__).resolve().with_name("workbook")
    return inside if inside.is_dir() else inside.parents[1]


def git(folder: Path, *arguments: str) -> str:
    """Run git and return its output. git answers in English and ignores a running hook.

    Args:
        folder: Folder in which git runs.
        arguments: Arguments of git.

    Raises:
        BadInput: Git is not installed, or the command fails. The message is git's last line.
    """
    rest = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            env=rest | {"LC_ALL": "C"},
        )
    except OSError:
        raise BadInput("git: is not installed; install git") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise BadInput(f"git {arguments[0]}: {last}")
    return done.stdout.strip()


def revision_of(folder: Path) -> str:
    """Return the git revision of a folder, with `+` if files have changed.

    The result is empty without git, outside a repository, or before the first commit.
    """
    with contextlib.suppress(BadInput):
        return git(folder, "describe", "--always", "--dirty=+", "--exclude=*")
    return ""


def expand_home(path: str) -> Path:
    """Replace `~` or `~user` in a path with the user's home folder, if the user exists."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def output_folder() -> Path:
    """Return the folder for results.

    The folder is $NANOLIB_OUTPUT if that variable is set. Without the variable, the folder is
    `outputs/` next to `notebooks/`, or `outputs/` in the working folder if there are no notebooks.
    """
    if named := os.environ.get(OUTPUT_VARIABLE):
        return expand_home(named).absolute()
    return (find_checkout() or Path.cwd()) / "outputs"


def make_folder(folder: Path) -> Path:
    """Create a folder for results, and its parents.

    Raises:
        BadInput: The system cannot create the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"output: {folder} cannot be created ({error.strerror}); name another folder"
        ) from None
    return folder


@contextlib.contextmanager
def put_in_place(target: Path) -> Iterator[Path]:
    """Write a file completely or not at all.

    Args:
        target: The file to create or to replace.

    Yields:
        A temporary path. Write the file to this path within the context. When the context ends,
        nanolib moves the file to the target. After an exception, nanolib deletes the file.

    Raises:
        OSError: The system cannot write the target.
    """
    with tempfile.TemporaryDirectory(prefix=".nanolib-", dir=target.absolute().parent) as folder:
        file = Path(folder) / target.name
        yield file
        file.replace(target)
