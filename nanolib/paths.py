"""Where files are: the notebooks and params files, and the results."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nanolib.measurement import BadInput

OUTPUT_VARIABLE = "NANOLIB_OUTPUT"
LAUNCH_VARIABLE = "NANOLIB_LAUNCH"  # `TOKEN/NAME`: `nano run` finds the run of a job by it
DATABASE = "results.sqlite"


def find_checkout() -> Path | None:
    """Find the folder with `notebooks/` and `params/`: a checkout, or a folder of `nano init`.

    Returns:
        The working folder or its nearest parent that contains both; otherwise the checkout of this
        package; None if it is not in one.
    """
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[1]):
        if any(folder.glob("notebooks/*.ipynb")) and (folder / "params" / "quick").is_dir():
            return folder
    return None


def checkout() -> Path:
    """Return the folder with `notebooks/` and `params/`.

    Raises:
        BadInput: There is none here, above, or around the package.
    """
    found = find_checkout()
    if found is None:
        raise BadInput(
            "notebooks: no folder with notebooks/ and params/ here or above; run: nano init DIR, "
            "and start nano in DIR"
        )
    return found


def installed_workbook() -> Path:
    """Return the folder with the `notebooks/` and `params/` of this nanolib.

    A wheel contains them as `nanolib/workbook`. In a checkout they are next to the package.
    """
    inside = Path(__file__).resolve().with_name("workbook")
    return inside if inside.is_dir() else inside.parents[1]


def expanded(path: str) -> Path:
    """Return the path with `~` as the home folder, and unchanged if that user does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def output_folder() -> Path:
    """Return the folder for results.

    It is $NANOLIB_OUTPUT if that is set, otherwise `outputs/` next to `notebooks/`, otherwise
    `outputs/` in the working folder.
    """
    if named := os.environ.get(OUTPUT_VARIABLE):
        return expanded(named).absolute()
    return (find_checkout() or Path.cwd()) / "outputs"


def database_path() -> Path:
    """Return the path of the database in the output folder."""
    return output_folder() / DATABASE


def make_folder(folder: Path) -> Path:
    """Create a folder for results, and its parents.

    Raises:
        BadInput: The folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"output: {folder} cannot be made ({error.strerror}); name another folder"
        ) from None
    return folder


@contextlib.contextmanager
def put_in_place(target: Path) -> Iterator[Path]:
    """Write a file completely or not at all, without replacing one.

    Args:
        target: The file to create.

    Yields:
        A temporary path next to the target. The block writes it. It becomes the target when the
        block ends, and is deleted if the block raises.

    Raises:
        FileExistsError: The target exists.
        OSError: The target cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=".nanolib-", dir=target.absolute().parent) as folder:
        file = Path(folder) / target.name
        yield file
        try:
            # A rename would replace a file that appeared while the block was writing.
            os.link(file, target)
        except OSError:  # the target exists, or the file system has no links
            if os.path.lexists(target):
                raise FileExistsError(target) from None
            file.rename(target)
