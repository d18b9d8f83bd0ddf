"""Sparse patterns that depend on positions alone, and the options of all.

A pattern is a function of (options, kv_len, heads) that returns a `Pattern`, and a line in `PATTERNS`. Causality is applied on top.
Those that look at the input are in `dynamic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pydantic

from nanolib.measurement import shown
from nanolib.models.attention.work import BLOCK_SIZE
from nanolib.params import StrictModel

Run = tuple[int, int]  # keys [start, stop)
MaskMod = Callable[
    [Any, Any, Any, Any], Any
]  # (batch, head, query, key) -> whether the query sees the key
DYNAMIC = ("top_k", "threshold", "dca")
WINDOWED = (
    "window",
    "local_global",
    "bigbird",
)  # whose window is searched for when a sparsity is asked for
_MOST = 2**24  # tokens: no sequence is longer


class Options(StrictModel):
    """Options of `sparse` and `flex`; each pattern says which it reads.

    Attributes:
        pattern: A key of `PATTERNS`, or one of `DYNAMIC`.
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
    model_config = pydantic.ConfigDict(frozen=True)  # masks are kept by their options

    pattern: str = "local_global"
    window: int = pydantic.Field(256, gt=0, le=_MOST)
    global_tokens: int = pydantic.Field(32, ge=0, le=_MOST)
    random_tokens: int = pydantic.Field(0, ge=0, le=_MOST)
    sparsity: float | None = pydantic.Field(None, ge=0, lt=1)
    mass: float = pydantic.Field(0.9, gt=0, le=1)
    block_size: int = pydantic.Field(BLOCK_SIZE, gt=0, le=_MOST)
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    per_head: bool = False

    @pydantic.model_validator(mode="after")
    def _pattern_takes_them(self) -> Options:
        known = [*PATTERNS, *DYNAMIC]
        if self.pattern not in known:
            raise ValueError(
                f"pattern: {shown(self.pattern)} is no pattern; use one of {', '.join(known)}"
            )
        if self.sparsity is not None and self.pattern in ("threshold", "dca"):
            raise ValueError(
                f"sparsity: {self.pattern} keeps what the input asks for; set mass, window or global_tokens instead"
            )
        return self


@dataclass(frozen=True, eq=False)
class Pattern:
    """Which connections are kept: by arithmetic on positions, or by a table of tiles.

    Attributes:
        near: (query position, key position) -> whether the query sees the key; on arrays of numpy and tensors alike.
        near_runs: (first and last query position) -> key ranges that hold all keys which `near` lets them see; they may overlap,
            and exceed the sequence's ends.
        table: Tiles that are kept beside them, bool [heads or 1, query tiles, key tiles].
        size: Side of such a tile, positions.
    """

    near: Callable[[Any, Any], Any]
    near_runs: Callable[[int, int], list[Run]]
    table: np.ndarray | None = None
    size: int = 1

    @property
    def heads(self) -> int:
        """How many heads see different keys."""
        return 1 if self.table is None else len(self.table)

    def mask_mod(self, offset: int, causal: bool, table: Any = None) -> MaskMod:
        """The pattern as FlexAttention asks for it.

        Args:
            offset: Position of the first query.
            causal: Whether the future is masked.
            table: `self.table` where positions are tensors: as a tensor on their device.
        """
        near, size, table = self.near, self.size, self.table if table is None else table
        heads = self.heads

        def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            position = q_idx + offset
            kept = near(position, kv_idx)
            if table is not None:
                kept = kept | table[h % heads, position // size, kv_idx // size]
            return kept & (kv_idx <= position) if causal else kept

        return keeps

    def runs(self, head: int, first: int, last: int) -> list[Run]:
        """Key ranges outside which no query from the first to the last position sees a key."""
        if self.table is None:
            return self.near_runs(first, last)
        rows = self.table[head % self.heads, first // self.size : last // self.size + 1]
        tiles = [
            (tile * self.size, (tile + 1) * self.size)
            for tile in rows.any(axis=0).nonzero()[0].tolist()
        ]
        return [*self.near_runs(first, last), *tiles]


def tile_count(length: int, size: int) -> int:
    """Tiles of `size` that cover `length` positions."""
    return -(-length // size)


def is_near(i: Any, j: Any, reach: int) -> Any:
    """|i − j| < reach, by comparisons alone: a difference would be a number of eight bytes for each pair."""
    return (j > i - reach) & (j < i + reach)


def window(options: Options, kv_len: int, heads: int) -> Pattern:
    """|i − j| < `window`: the keys around a query, its own position included."""
    reach = options.window
    return Pattern(
        lambda i, j: is_near(i, j, reach), lambda first, last: [(first - reach + 1, last + reach)]
    )


def local_global(options: Options, kv_len: int, heads: int) -> Pattern:
    """The window, and the first `global_tokens` positions, which see every key and are seen by every query.

    Source: Beltagy, Peters & Cohan (2020), Longformer, arXiv 2004.05150.
    """
    reach, leading = options.window, options.global_tokens

    def runs(first: int, last: int) -> list[Run]:
        return (
            [(0, kv_len)] if first < leading else [(0, leading), (first - reach + 1, last + reach)]
        )

    return Pattern(lambda i, j: is_near(i, j, reach) | (i < leading) | (j < leading), runs)


def strided(options: Options, kv_len: int, heads: int) -> Pattern:
    """A query's own tile and every `stride`-th from it: 1 / (1 − `sparsity`), or as many tiles as hold `window` tokens.

    Source: Child, Gray, Radford & Sutskever (2019), Sparse Transformer, arXiv 1904.10509; of tiles, so that they can be skipped.
    """
    size = options.block_size
    stride = options.window / size if options.sparsity is None else 1 / (1 - options.sparsity)
    stride = max(1, round(stride))

    def runs(first: int, last: int) -> list[Run]:
        residues = {row % stride for row in range(first // size, last // size + 1)}
        tiles = range(tile_count(kv_len, size))
        return [(tile * size, (tile + 1) * size) for tile in tiles if tile % stride in residues]

    return Pattern(lambda i, j: (i // size - j // size) % stride == 0, runs)


def block(options: Options, kv_len: int, heads: int) -> Pattern:
    """A query's own chunk alone: (1 − `sparsity`) · kv_len tokens in whole tiles, or `window` tokens."""
    size, chunk = options.block_size, options.window
    if options.sparsity is not None:
        chunk = max(1, round((1 - options.sparsity) * kv_len / size)) * size
    return _chunks(chunk)


def random(options: Options, kv_len: int, heads: int) -> Pattern:
    """A row's own tile and others drawn at random: all but `sparsity` of them, or so many that they hold `random_tokens`.

    Source: the random part of Zaheer et al. (2020), Big Bird, arXiv 2007.14062.
    """
    size = options.block_size
    kept = 1 + tile_count(options.random_tokens, size)
    if options.sparsity is not None:
        kept = max(1, round((1 - options.sparsity) * tile_count(kv_len, size)))
    return replace(_chunks(size), table=_draw(options, kv_len, heads, kept), size=size)


def bigbird(options: Options, kv_len: int, heads: int) -> Pattern:
    """`local_global`, and random tiles that hold `random_tokens`.

    Source: Zaheer et al. (2020), Big Bird, arXiv 2007.14062.
    """
    size, near = options.block_size, local_global(options, kv_len, heads)
    if not options.random_tokens:
        return near
    kept = 1 + tile_count(options.random_tokens, size)
    return replace(near, table=_draw(options, kv_len, heads, kept), size=size)


def _chunks(chunk: int) -> Pattern:
    return Pattern(
        lambda i, j: i // chunk == j // chunk,
        lambda first, last: [(first // chunk * chunk, (last // chunk + 1) * chunk)],
    )


def _draw(options: Options, kv_len: int, heads: int, kept: int) -> np.ndarray:
    """Which tiles each row keeps, its own among them: bool [heads, tiles, tiles]."""
    tiles = tile_count(kv_len, options.block_size)
    tables = np.zeros((heads, tiles, tiles), dtype=bool)
    for head, table in enumerate(tables):
        source = np.random.RandomState((options.seed + 1_000_003 * head) % 2**32)
        # the 24 bits that torch.rand would make a number of: a seed draws the same tiles by either
        order = (source.randint(2**32, size=(tiles, tiles), dtype=np.uint32) & 0xFFFFFF).astype(
            np.int64
        )
        np.fill_diagonal(order, -1)
        np.put_along_axis(table, order.argsort(axis=1, kind="stable")[:, :kept], True, axis=1)
    return tables


PATTERNS: dict[str, Callable[[Options, int, int], Pattern]] = {
    "window": window,
    "local_global": local_global,
    "strided": strided,
    "block": block,
    "random": random,
    "bigbird": bigbird,
}
