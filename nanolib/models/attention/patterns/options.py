"""Options that all sparse patterns share; each pattern says which it reads."""

from __future__ import annotations

from typing import ClassVar

import pydantic

from nanolib.models.attention.work import BLOCK_SIZE
from nanolib.params import StrictModel

_MOST = 2**24  # tokens: no sequence is longer


class SparseOptions(StrictModel):
    """Options of `sparse`, before the pattern's name is looked up.

    Attributes:
        pattern: A key of `PATTERNS`, or of `CHOOSERS` for those that look at the input.
        window: Reach of the local part, tokens.
        global_tokens: Positions that all see: the leading ones (`local_global`, `bigbird`), or at most so many chosen ones (`dca`).
        random_tokens: Random keys (`bigbird`, `random`: in whole tiles).
        sparsity: Share of connections to remove, in [0, 1); it takes the place of `window`.
        mass: Share of the estimated attention that `threshold` keeps.
        block_size: Side of a tile: what is skipped, and how many queries attend at once.
        seed: For patterns that draw.
        per_head: Whether each head draws for itself (`random`, `bigbird`).
    """

    NAME: ClassVar[str] = "attention_options"

    pattern: str = "local_global"
    window: int = pydantic.Field(256, gt=0, le=_MOST)
    global_tokens: int = pydantic.Field(32, ge=0, le=_MOST)
    random_tokens: int = pydantic.Field(0, ge=0, le=_MOST)
    sparsity: float | None = pydantic.Field(None, ge=0, lt=1)
    mass: float = pydantic.Field(0.9, gt=0, le=1)
    block_size: int = pydantic.Field(BLOCK_SIZE, gt=0, le=_MOST)
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    per_head: bool = False
