"""Where things are: the checkout with its notebooks and params, and where results go."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nanolib.measurement import BadInput

OUTPUT_VARIABLE = "NANOLIB_OUTPUT"
LAUNCH_VARIABLE = "NANOLIB_LAUNCH"  # by which `nano run` finds the run of a job: `TOKEN/NAME`, the token that of the command
DATABASE = "results.sqlite"


def find_checkout() -> Path | None:
    """The checkout: from the working folder upwards, then from the package upwards; None outside one."""
    for origin in (Path.cwd(), Path(__file__).resolve()):
        for folder in (origin, *origin.parents):
            if (folder / "notebooks").is_dir() and (
                folder / "nanolib" / "measurement.py"
            ).is_file():
                return folder
    return None


def checkout() -> Path:
    """The checkout.

    Raises:
        BadInput: There is none: notebooks and params are part of the checkout, not of the installed package.
    """
    found = find_checkout()
    if found is None:
        raise BadInput(
            "checkout: no notebooks/ here or above, nor beside the package; run nano inside a nanolib checkout"
        )
    return found


def expanded(path: str) -> Path:
    """The path with `~` as the home folder; where that names no user it stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def output_folder() -> Path:
    """Where results go: $NANOLIB_OUTPUT, else `outputs/` of the checkout, else `outputs/` in the working folder."""
    if named := os.environ.get(OUTPUT_VARIABLE):
        return expanded(named).absolute()
    return (find_checkout() or Path.cwd()) / "outputs"


def database_path() -> Path:
    """The database in the output folder."""
    return output_folder() / DATABASE


def make_folder(folder: Path) -> Path:
    """Make a folder for results, with those above it.

    Raises:
        BadInput: It cannot be made.
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
    """Give a path beside the target to write to; after the block it is the target, whole, and after an error nothing is.

    Args:
        target: What it will be.

    Raises:
        FileExistsError: The target is there.
        OSError: It cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=".nanolib-", dir=target.absolute().parent) as folder:
        file = Path(folder) / target.name
        yield file
        try:
            os.link(
                file, target
            )  # unlike a rename, it does not overwrite what has appeared during the writing
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if os.path.lexists(target):
                raise FileExistsError(target) from None
            file.rename(target)
