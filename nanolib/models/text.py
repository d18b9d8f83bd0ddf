"""Read text as bytes, by default the sources of Python's standard library."""

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded

VOCAB_SIZE = 256


@functools.lru_cache(maxsize=4)
def load(corpus: str = "", max_bytes: int = 4_000_000) -> Tensor:
    """Read a corpus as bytes.

    Args:
        corpus: Path of a text file, or of a folder whose files are read in the order of their
            names. If empty, nanolib reads the Python files of Python's standard library.
        max_bytes: Largest number of bytes to read.

    Returns:
        Bytes of the corpus, uint8, shape [bytes].

    Raises:
        BadInput: The corpus has fewer than two bytes, or cannot be read.
    """
    root = expanded(corpus) if corpus else Path(sysconfig.get_path("stdlib"))
    # Files of other types differ between machines. The limit comes before site-packages.
    files = sorted(root.rglob("*" if corpus else "*.py"))
    data = bytearray()
    try:
        for path in filter(Path.is_file, [root, *files]):
            with path.open("rb") as file:
                data += file.read(max_bytes - len(data))
            if len(data) >= max_bytes:
                break
    except OSError as error:
        raise BadInput(
            f"corpus: {shown(corpus)} cannot be read ({error.strerror}); give another text"
        ) from None
    if len(data) < 2:
        raise BadInput(
            f"corpus: {shown(corpus)} has {len(data)} bytes; give a text file or a folder with at least two"
        )
    return torch.frombuffer(data, dtype=torch.uint8)


def batches(
    data: Tensor, count: int, batch_size: int, length: int, generator: torch.Generator, device: str
) -> Iterator[Tensor]:
    """Draw batches of random sequences from a text, one batch at a time.

    Args:
        data: Bytes of a text, from `load`.
        count: Number of batches.
        batch_size: Number of sequences per batch.
        length: Bytes per sequence. A loss over n predictions needs n + 1 bytes.
        generator: Generator of the random positions.
        device: Device of the batches.

    Yields:
        Token ids in [0, 256), int64, shape [batch_size, length].

    Raises:
        BadInput: The text is shorter than `length`.
    """
    if len(data) < length:
        raise BadInput(
            f"corpus: the text has {len(data)} bytes, and a sequence needs {length}; give a longer text"
        )
    for _ in range(count):
        starts = torch.randint(len(data) - length + 1, (batch_size,), generator=generator)
        yield torch.stack([data[start : start + length] for start in starts]).long().to(device)
