"""Real text that is on every machine: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch

from nanolib.measurement import BadInput
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
    if not root.exists():
        raise BadInput(f"corpus: {str(corpus)!r} does not exist; give a text file or a folder, or leave it empty")
    if root.is_file():
        files = [root]
    else:  # site-packages differs between machines: the standard library's own packages only
        found = (f for f in root.rglob("*.py" if not corpus else "*") if f.is_file())
        files = sorted(f for f in found if corpus or "site-packages" not in f.parts)
    data = bytearray()
    for file in files:
        data += file.read_bytes()[: max_bytes - len(data)]
        if len(data) >= max_bytes:
            break
    if len(data) < 2:
        raise BadInput(f"corpus: {str(corpus)!r} holds {len(data)} bytes; give a text of at least two")
    return torch.frombuffer(data, dtype=torch.uint8)


def batch(data: torch.Tensor, batch_size: int, length: int, generator: torch.Generator) -> torch.Tensor:
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
        raise BadInput(f"corpus: {len(data)} bytes are shorter than a sequence of {length}; give a longer text")
    starts = torch.randint(len(data) - length + 1, (batch_size,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts]).long()
