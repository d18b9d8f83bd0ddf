"""Real text that is on every machine: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded

VOCAB_SIZE = 256


@functools.lru_cache(maxsize=4)
def load(corpus: str = "", max_bytes: int = 4_000_000) -> torch.Tensor:
    """The corpus as bytes.

    Args:
        corpus: A text file, or a folder whose files are read in the order of their names; empty means the standard
            library's `.py` files.
        max_bytes: Read no more than this.

    Returns:
        uint8, shape [bytes].

    Raises:
        BadInput: There is nothing to read.
    """
    root = expanded(corpus) if corpus else Path(sysconfig.get_path("stdlib"))
    data = bytearray()
    try:
        if not root.exists():
            raise BadInput(
                f"corpus: {shown(corpus)} does not exist; give a text file or a folder, or leave it empty"
            )
        for path in [str(root)] if root.is_file() else _files_below(str(root), not corpus):
            with open(path, "rb") as file:
                data += file.read(max_bytes - len(data))
            if len(data) >= max_bytes:
                break
    except OSError as error:
        raise BadInput(
            f"corpus: {shown(corpus)} cannot be read ({error.strerror}); give another text"
        ) from None
    if len(data) < 2:
        raise BadInput(
            f"corpus: {shown(corpus)} holds {len(data)} bytes; give a text of at least two"
        )
    return torch.frombuffer(data, dtype=torch.uint8)


def _files_below(folder: str, library: bool) -> Iterator[str]:
    """Regular files in the order of their names, found as they are asked for: a folder may be a whole disk.

    Of the standard library its own Python files alone, since site-packages differs between machines.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            if not (library and entry.name == "site-packages"):
                yield from _files_below(entry.path, library)
        elif entry.is_file() and (not library or entry.name.endswith(".py")):
            yield entry.path


def batch(
    data: torch.Tensor, batch_size: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Random windows of the text.

    Args:
        data: From `load`.
        batch_size: Sequences.
        length: Bytes per sequence; for a loss over n predictions give n + 1.
        generator: Draws the windows.

    Returns:
        int64 ids in [0, 256), shape [batch_size, length].

    Raises:
        BadInput: The text is shorter than `length`.
    """
    if len(data) < length:
        raise BadInput(
            f"corpus: {len(data)} bytes are shorter than a sequence of {length}; give a longer text"
        )
    starts = torch.randint(len(data) - length + 1, (batch_size,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts]).long()


def batches(
    data: torch.Tensor,
    count: int,
    batch_size: int,
    length: int,
    generator: torch.Generator,
    device: str,
) -> Iterator[torch.Tensor]:
    """So many of `batch`, each drawn when it is asked for, on `device`."""
    for _ in range(count):
        yield batch(data, batch_size, length, generator).to(device)
