"""The inverse of a layout, which only a test needs."""

import torch


def restore(layout, parts, dim=2):
    """The whole sequence from all ranks' parts: the inverse of `take`."""
    split = [
        (piece, part)
        for pieces, held in zip(layout.pieces, parts, strict=True)
        for piece, part in zip(
            pieces, held.split([stop - start for start, stop in pieces], dim=dim), strict=True
        )
    ]
    return torch.cat([part for _, part in sorted(split, key=lambda item: item[0])], dim=dim)
