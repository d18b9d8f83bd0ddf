"""Draw batches of real text for cases."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanolib.models import text


def text_batches(case: Any, corpus: str, seed: int, count: int) -> Iterator[Tensor]:
    """Draw batches of real text for a case.

    Args:
        case: A case with `batch_size`, `seq_len` and `device`.
        corpus: Text file or folder, or empty for the standard library's sources.
        seed: Seed of the random positions in the text.
        count: Number of batches.

    Yields:
        Token ids, int64, shape [batch_size, seq_len + 1], on the case's device.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (count, case.batch_size, case.seq_len + 1)
    return text.batches(text.load(corpus), *shape, generator, case.device)


def text_batch(case: Any, corpus: str, seed: int) -> Tensor:
    """Draw one batch of real text for a case."""
    return next(text_batches(case, corpus, seed, 1))
