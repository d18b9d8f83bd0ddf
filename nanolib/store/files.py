"""A database as a file: whether it is one, whether it is whole, and whether and how it can be opened."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from nanolib.measurement import BadInput

_MAGIC = b"SQLite format 3\0"


def is_database(path: Path) -> bool:
    """Whether a file looks like one of SQLite's, whatever its name: a label may be a file's name too."""
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def writable(path: Path) -> bool:
    """Whether the file, and beside it its journal, can be written."""
    return os.access(path.parent, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))


def address(path: Path) -> str:
    """For SQLite; what cannot be written is read without a lock, which could not be taken, unless somebody has a journal there."""
    uri = path.absolute().as_uri()
    if writable(path):
        return uri
    return uri + ("?mode=ro" if Path(f"{path}-wal").exists() else "?mode=ro&immutable=1")


def check_length(path: Path) -> None:
    """SQLite reads a file that was cut off until it comes to the place; its header tells how long it was.

    Raises:
        BadInput: It is shorter.
    """
    # with a log beside it that is not settled yet
    if not path.is_file() or path.with_name(f"{path.name}-wal").exists():
        return
    with path.open("rb") as file:
        header = file.read(100)
    if len(header) == 100 and header.startswith(_MAGIC):
        page, pages = struct.unpack(">H", header[16:18])[0], struct.unpack(">I", header[28:32])[0]
        if path.stat().st_size < (65_536 if page == 1 else page) * pages:
            raise BadInput(f"database: {path} cannot be read, it is cut off; name another, or copy it again")
