"""Folders for what a process makes on its way: they go with it, and where it was killed, with the next command.

Whoever made a folder holds its lock (`flock`), which the system releases when the process ends, however that happens: no number
of a process, boot or container has to be told apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import weakref
from pathlib import Path
from typing import Self

PURPOSES = ("ab", "case", "explore", "overhead", "ranks", "ray", "report", "run", "side")
_OURS = 0o1700  # no folder that somebody made by hand, whatever its name, has this mode


class Scratch:
    """A folder of this process alone, readable by its user alone; removed with the block, or by `cleanup`.

    Args:
        purpose: What it is for, one of `PURPOSES`; a part of its name.
        beside: The folder in which it is made, hidden; the one for temporary files by default.

    Attributes:
        path: The folder.
    """

    def __init__(self, purpose: str, beside: Path | None = None) -> None:
        if purpose not in PURPOSES:
            raise ValueError(
                f"purpose: {purpose!r} is not in PURPOSES, so nobody would remove what is left behind; add it"
            )
        parent = beside or Path(tempfile.gettempdir())
        remove_left_behind(parent)
        claim = None
        while claim is None:  # it may be taken for a dead one's in the moment before it is claimed
            self.path = Path(tempfile.mkdtemp(prefix=f"{'.' if beside else ''}nanolib-{purpose}-", dir=parent))
            try:
                claim = _claim(self.path, wait=True)
            except OSError:  # a file system without locks, where nobody can tell what is left behind
                claim = os.open(self.path, os.O_RDONLY)
        self.path.chmod(_OURS)
        self.cleanup = weakref.finalize(self, _remove, self.path, claim)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def remove_left_behind(parent: Path) -> None:
    """Remove the folders of this user whose process is gone."""
    names = tuple(f"nanolib-{purpose}-" for purpose in PURPOSES)
    with contextlib.suppress(OSError):  # the folder is not there, or nobody may list it
        for folder in parent.iterdir():
            if folder.name.removeprefix(".").startswith(names):
                with contextlib.suppress(OSError):  # it is another user's, or no folder
                    claim = _claim(folder, wait=False)
                    if claim is not None:
                        _remove(folder, claim)


def _claim(folder: Path, *, wait: bool) -> int | None:
    """An open file that holds the folder's lock; None where another process holds it, or the folder is gone."""
    try:
        claim = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        mine = os.fstat(claim)
        mode = stat.S_IMODE(mine.st_mode)
        ours = wait or mode == _OURS or (mode == 0o700 and not any(folder.iterdir()))  # killed before it was marked
        if mine.st_uid != os.geteuid() or not ours:
            raise PermissionError(f"{folder} is another user's, or was not made here")
        fcntl.flock(claim, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if not os.path.samestat(mine, folder.lstat()):
            raise FileNotFoundError(folder)
    except (BlockingIOError, FileNotFoundError):
        os.close(claim)
        return None
    except OSError:
        os.close(claim)
        raise
    return claim


def _remove(folder: Path, claim: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(claim)
