"""Define the sparse patterns that depend only on positions, and the options of all patterns.

A pattern is a function of `PatternInputs` that returns a `mask_mod` of positions. `PATTERNS` lists
the patterns by name. nanolib calls the `mask_mod` with arrays to find the kept tiles, and
FlexAttention calls the `mask_mod` with tensors. nanolib adds the causal mask. Patterns that depend
on the values of queries and keys are in `dynamic`.

By default, nanolib evaluates a pattern for all query-key pairs to find the kept tiles. This is slow
for long sequences, so nanolib evaluates patterns in `BY_CORNERS` only at the edges of tiles and on
the diagonal. A pattern in `BY_CORNERS` must keep the diagonal. In each tile, the pattern must keep
all pairs, no pairs, a band around the diagonal, one document, or leading rows or columns.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import pydantic
import torch

from nanolib.config import ATTENTION_PATTERNS, Size
from nanolib.measurement import BadInput
from nanolib.models.attention.reference import BLOCK_SIZE, tile_count
from nanolib.models.user import check_function, import_callable
from nanolib.params import StrictModel
from nanolib.torch_internals import disable_dispatch_modes

# A mask_mod maps (batch, head, query, key) to whether the query sees the key.
MaskMod = Callable[[Any, Any, Any, Any], Any]
Device = torch.device | None  # The device is None if the indices are numpy arrays.
# Patterns whose sparsity depends on the window.
WINDOWED = ("window", "local_global", "bigbird")
# Patterns whose sparsity depends on the number of kept tiles.
BY_TILE = ("strided", "block", "random", "top_k")
BY_CORNERS = (*WINDOWED, "strided", "block", "random", "document", "prefix_lm")
_Tokens = Annotated[int, pydantic.Field(ge=0, le=2**24)]


class Options(StrictModel):
    """Options of the attentions `sparse` and `flex`.

    Each pattern reads only some of these options.

    Attributes:
        pattern: Name of a pattern, a key of `PATTERNS` or of `dynamic.CHOOSERS`.
        window: Reach of the local window, in tokens.
        global_tokens: Number of positions that every query sees. `dca` chooses at most
            `global_tokens` positions by score, and other patterns take the first positions.
        random_tokens: Number of random keys for each block of queries. `bigbird` and `random` round
            this number up to whole tiles.
        sparsity: Share of query-key pairs to remove, in [0, 1). `sparsity` overrides `window`. The
            default of `strided` and `top_k` is 0.9.
        mass: Share of the estimated attention that `threshold` keeps.
        block_size: Side of a tile, in tokens. The kernel computes or skips a whole tile.
        seed: Seed of the random tiles and keys.
        document_lengths: Lengths of the documents in a sequence, in tokens, repeated as needed.
        document_starts: Position of the first token of each document after the first document, in
            any order.
        mask_mod: Mask for the pattern `own`, as `package.module:function`. If the mask uses the
            index of the head, each head has its own mask. All sequences of a batch must share one
            mask.
    """

    NAME = "attention_options"
    model_config = pydantic.ConfigDict(frozen=True)  # Caches of masks use the options as a key.

    pattern: Literal[tuple(ATTENTION_PATTERNS)] = "local_global"
    window: Size = 256
    global_tokens: _Tokens = 32
    random_tokens: _Tokens = 32
    sparsity: float | None = pydantic.Field(None, ge=0, lt=1)
    mass: float = pydantic.Field(0.9, gt=0, le=1)
    block_size: Size = BLOCK_SIZE
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    document_lengths: tuple[Size, ...] = ()
    document_starts: tuple[Size, ...] = ()
    mask_mod: str = ""

    @pydantic.model_validator(mode="after")
    def _pattern_takes_them(self) -> Self:
        if self.sparsity is not None and self.pattern not in (*WINDOWED, *BY_TILE):
            raise ValueError(
                f"sparsity: {self.pattern} has no sparsity to set; "
                "set mass, window, global_tokens or document_lengths instead"
            )
        if self.pattern == "document" and bool(self.document_lengths) == bool(self.document_starts):
            raise ValueError(
                "document_lengths: pattern document needs either document_lengths or "
                "document_starts"
            )
        if self.pattern == "own":
            check_function("mask_mod", self.mask_mod)
        elif self.mask_mod:
            raise ValueError(
                f"mask_mod: {self.pattern} has its own mask; set pattern: own, or remove mask_mod"
            )
        return self

    @property
    def tile_sparsity(self) -> float:
        """Share of tiles that `strided` and `top_k` remove."""
        return 0.9 if self.sparsity is None else self.sparsity

    def hides_future(self, causal: bool) -> bool:
        """Return whether nanolib adds the causal mask. `prefix_lm` has its own causal mask."""
        return causal and self.pattern != "prefix_lm"


class PatternInputs(NamedTuple):
    """The inputs of a pattern.

    Attributes:
        options: Options of the pattern.
        kv_len: Number of keys.
        device: Device of the mask's tables, or None for numpy arrays.
    """

    options: Options
    kv_len: int
    device: Device


def copy_to_device(x: np.ndarray, device: Device):
    """Copy an array to a device. In a memory plan, the copy is a tensor without data."""
    # In a memory plan, `.to` would keep the values of small arrays, and would need the device.
    if device is None:
        return x
    values = torch.from_numpy(x)
    return torch.empty(values.shape, dtype=values.dtype, device=device).copy_(values)


def is_near(i, j, reach: int):
    """Return whether |i − j| < reach."""
    # The difference i − j would need eight bytes per pair, and a comparison needs one byte.
    return (j > i - reach) & (j < i + reach)


def window(inputs: PatternInputs) -> MaskMod:
    """Keep the pairs of a query i and a key j with |i − j| < `window`.

    Source: the sliding window of Beltagy, Peters & Cohan (2020), Longformer, arXiv 2004.05150.
    """
    reach = inputs.options.window
    return lambda b, h, q_idx, kv_idx: is_near(q_idx, kv_idx, reach)


def local_global(inputs: PatternInputs) -> MaskMod:
    """Keep the pairs of `window`, and all pairs with one of the first `global_tokens` positions.

    Source: Beltagy, Peters & Cohan (2020), Longformer, arXiv 2004.05150.
    """
    near, leading = window(inputs), inputs.options.global_tokens
    return lambda b, h, q_idx, kv_idx: (
        near(b, h, q_idx, kv_idx) | (q_idx < leading) | (kv_idx < leading)
    )


def strided(inputs: PatternInputs) -> MaskMod:
    """Keep the tile on the diagonal, and every stride-th tile to the left and right.

    The stride is 1 / (1 − `sparsity`), rounded to whole tiles.

    Source: Child, Gray, Radford & Sutskever (2019), Sparse Transformer, arXiv 1904.10509. Here
    the stride counts tiles, because a kernel skips only whole tiles.
    """
    size, stride = inputs.options.block_size, round(1 / (1 - inputs.options.tile_sparsity))
    return lambda b, h, q_idx, kv_idx: (q_idx // size - kv_idx // size) % stride == 0


def block(inputs: PatternInputs) -> MaskMod:
    """Divide the sequence into chunks, and keep the pairs within each chunk.

    A chunk has (1 − `sparsity`) · kv_len tokens, rounded to whole tiles. Without `sparsity`, a
    chunk has `window` tokens.

    Source: Qiu et al. (2020), Blockwise Self-Attention, arXiv 1911.02972.
    """
    options, size, chunk = inputs.options, inputs.options.block_size, inputs.options.window
    if options.sparsity is not None:
        chunk = max(1, round((1 - options.sparsity) * inputs.kv_len / size)) * size
    return lambda b, h, q_idx, kv_idx: q_idx // chunk == kv_idx // chunk


def random(inputs: PatternInputs) -> MaskMod:
    """Keep the tile on the diagonal, and random tiles in each row of tiles.

    The share of kept tiles is 1 − `sparsity`. By default, a row has `random_tokens` random tokens.

    Source: the random attention of Zaheer et al. (2020), Big Bird, arXiv 2007.14062.
    """
    options, size = inputs.options, inputs.options.block_size
    tiles, kept = tile_count(inputs.kv_len, size), 1 + tile_count(options.random_tokens, size)
    if options.sparsity is not None:
        kept = max(1, round((1 - options.sparsity) * tiles))
    order = np.random.RandomState(options.seed).rand(tiles, tiles)
    np.fill_diagonal(order, -1)
    table = copy_to_device(order.argsort(axis=1).argsort(axis=1) < kept, inputs.device)
    return lambda b, h, q_idx, kv_idx: table[q_idx // size, kv_idx // size]


def bigbird(inputs: PatternInputs) -> MaskMod:
    """Keep the pairs of `local_global`, and random tiles with `random_tokens` tokens in each row.

    Source: Zaheer et al. (2020), Big Bird, arXiv 2007.14062.
    """
    near = local_global(inputs)
    if not inputs.options.random_tokens:
        return near
    drawn = random(inputs)
    return lambda b, h, q_idx, kv_idx: near(b, h, q_idx, kv_idx) | drawn(b, h, q_idx, kv_idx)


def document(inputs: PatternInputs) -> MaskMod:
    """Keep the pairs within each document of a sequence that contains several documents.

    Source: Krell et al. (2021), Efficient Sequence Packing, arXiv 2107.02027.
    """
    lengths = itertools.cycle(inputs.options.document_lengths)
    starts = sorted(inputs.options.document_starts) or itertools.accumulate(lengths)
    inner = [*itertools.takewhile(lambda start: start < inputs.kv_len, starts)]
    positions = np.arange(inputs.kv_len)
    numbers = copy_to_device(np.searchsorted(inner, positions, side="right"), inputs.device)
    return lambda b, h, q_idx, kv_idx: numbers[q_idx] == numbers[kv_idx]


def prefix_lm(inputs: PatternInputs) -> MaskMod:
    """Keep the first `global_tokens` keys and all keys up to the query, even without `causal`.

    Source: Raffel et al. (2020), T5, arXiv 1910.10683.
    """
    prefix = inputs.options.global_tokens
    return lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (kv_idx <= q_idx)


def import_mask(inputs: PatternInputs) -> MaskMod:
    """Import your own `mask_mod(b, h, q_idx, kv_idx)`.

    nanolib refuses a mask that uses `b` if there are several sequences. To find the kept tiles,
    nanolib evaluates the mask on the CPU, even in a memory plan, whose tensors have no data.
    """
    with on_cpu():  # The module of the mask must not create tensors without data.
        mask_mod = import_callable("attention_options.mask_mod", inputs.options.mask_mod)

    def keeps(*at: np.ndarray) -> np.ndarray:
        with on_cpu():
            indices = torch.broadcast_tensors(*map(torch.as_tensor, at))
            kept = torch.as_tensor(mask_mod(*indices))  # A mask may return True for all pairs.
            if kept.dtype != torch.bool:
                raise BadInput(
                    f"attention_options.mask_mod: {inputs.options.mask_mod} returned "
                    f"{kept.dtype}; return booleans"
                )
            return kept.expand(indices[0].shape).cpu().numpy()

    return mask_mod if inputs.device else keeps


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Create tensors on the CPU within the context, without any active dispatch mode."""
    with disable_dispatch_modes(), torch.device("cpu"):
        yield


PATTERNS = {
    "window": window,
    "local_global": local_global,
    "strided": strided,
    "block": block,
    "random": random,
    "bigbird": bigbird,
    "document": document,
    "prefix_lm": prefix_lm,
    "own": import_mask,
}


def static_mask_mod(
    options: Options, q_len: int, kv_len: int, causal: bool, device: Device
) -> MaskMod:
    """Return the `mask_mod` of a pattern with the causal mask. `options` is from a `BlockMask`."""
    mask_mod = PATTERNS[options.pattern](PatternInputs(options, kv_len, device))
    return align_queries(mask_mod, kv_len - q_len, options.hides_future(causal))


def align_queries(mask_mod: MaskMod, offset: int, causal: bool) -> MaskMod:
    """Shift the queries of a `mask_mod` by `offset`, and hide later keys if `causal` is true."""

    def keeps(b, h, q_idx, kv_idx):
        position = q_idx + offset
        kept = mask_mod(b, h, position, kv_idx)
        return kept & (kv_idx <= position) if causal else kept

    return keeps if offset or causal else mask_mod
