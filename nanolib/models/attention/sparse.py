"""Block-sparse attention: a pattern says which keys each block of queries sees, and nothing else is computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pydantic
import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanolib.measurement import shown
from nanolib.models.attention import block_sparse, lowering
from nanolib.models.attention.block_mask import BlockMask, plan_of, real_tensors, window_for
from nanolib.models.attention.choice import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS, WINDOWED, Pattern
from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.work import Work


class Options(SparseOptions):
    """Options of `sparse`, checked."""

    @pydantic.field_validator("pattern")
    @classmethod
    def _known_pattern(cls, value: str) -> str:
        if value not in PATTERNS and value not in CHOOSERS:
            raise ValueError(f"{shown(value)} is no pattern; use one of {', '.join([*PATTERNS, *CHOOSERS])}")
        return value

    @pydantic.model_validator(mode="after")
    def _sparsity_is_taken(self) -> Options:
        if self.sparsity is not None and self.pattern in ("threshold", "dca"):
            raise ValueError(
                f"sparsity: {self.pattern} keeps what the input asks for; set mass, window or global_tokens instead"
            )
        return self


_WATCHERS: list[Callable[[Work], None]] = []


@contextlib.contextmanager
def watched_work() -> Iterator[list[Work]]:
    """What every call inside keeps: the way to know it where the input decides."""
    found: list[Work] = []
    _WATCHERS.append(found.append)
    try:
        yield found
    finally:
        _WATCHERS.remove(found.append)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    options: Options,
    scores: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sparse attention; see `nanolib.models.attention.attend`."""
    if is_lowered(q, options):
        if _WATCHERS:
            work = choose_mask(q, k, causal=causal, options=options, scores=scores).work
            for watcher in _WATCHERS:
                watcher(work)
        mask = lowered_mask(q, k, causal=causal, options=options, scores=scores)
        return lowering.attend(q, k, v, mask, scale, key(options))
    mask = choose_mask(q, k, causal=causal, options=options, scores=scores)
    for watcher in _WATCHERS:
        watcher(mask.work)
    return block_sparse.attend(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)


def is_lowered(q: torch.Tensor, options: Options) -> bool:
    """Whether FlexAttention computes it; a counter of operations is shown the loop, whose operations it knows."""
    counters = [mode for mode in _get_current_dispatch_mode_stack() if not isinstance(mode, FakeTensorMode)]
    counted = bool(counters) and detect_fake_mode() is None
    shape = q.device.type, q.dtype, q.shape[-1], q.shape[2], options.block_size
    return not (counted or lowering.not_lowered(*shape))


def lowered_mask(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, options: Options, scores: torch.Tensor | None = None
) -> lowering.FlexMask:
    """The mask as FlexAttention takes it; arguments as of `choose_mask`."""
    if options.pattern in CHOOSERS:
        return lowering.of_choice(CHOOSERS[options.pattern](q, k, causal, options, scores))
    return lowering.of_blocks(_static(*_shape(q, k, causal, options)), q.device)


def choose_mask(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, options: Options, scores: torch.Tensor | None = None
) -> BlockMask:
    """Which keys each block of queries sees.

    Args:
        q: As in `attend`.
        k: As in `attend`.
        causal: Whether the future is masked.
        options: The pattern and its sizes.
        scores: Learned score per token, shape [batch, kv_len], for `dca`.

    Returns:
        A mask; kept for the next call where it depends on the shape alone.
    """
    if options.pattern in CHOOSERS:
        return CHOOSERS[options.pattern](q, k, causal, options, scores).blocks()
    return _static(*_shape(q, k, causal, options))


def build_mask(
    q: torch.Tensor, k: torch.Tensor, *, causal: bool, options: Options, lowered: bool = False
) -> BlockMask | lowering.FlexMask:
    """`choose_mask`, or `lowered_mask`, without its memory: what making the mask costs."""
    if options.pattern in CHOOSERS:
        choice = CHOOSERS[options.pattern](q, k, causal, options, None)
        return lowering.of_choice(choice) if lowered else choice.blocks()
    made = _static.__wrapped__(*_shape(q, k, causal, options))
    return lowering.made(made, q.device) if lowered else made


def _shape(q: torch.Tensor, k: torch.Tensor, causal: bool, options: Options) -> tuple[Any, ...]:
    plans = q.shape[0] * q.shape[1] if options.per_head else 1
    return q.shape[2], k.shape[2], causal, key(options), plans, q.shape[1]


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> Work | None:
    """Connections and tiles that the pattern keeps, counted from its mask; None where that depends on the input."""
    if options.pattern in CHOOSERS:
        return None
    return _static(q_len, kv_len, causal, key(options), 1, 1).work


@functools.lru_cache(maxsize=64)
def _static(q_len: int, kv_len: int, causal: bool, key: tuple[Any, ...], plans: int, heads: int) -> BlockMask:
    """The mask of a pattern that depends on the shape alone; a model asks for the same one in each layer."""
    with real_tensors():
        return _made(q_len, kv_len, causal, key, plans, heads)


def _made(q_len: int, kv_len: int, causal: bool, key: tuple[Any, ...], plans: int, heads: int) -> BlockMask:
    options = Options.model_construct(**dict(zip(Options.model_fields, key, strict=True)))
    if options.sparsity is not None and options.pattern in WINDOWED:
        make = functools.partial(_with_window, options, kv_len)
        window = window_for(options.sparsity, make, q_len, kv_len, causal, options.block_size)
        options = options.model_construct(**{**options.__dict__, "window": window})
    patterns = tuple(_of_head(options, head, kv_len) for head in range(min(plans, heads)))
    drawn = [plan_of(pattern, q_len, kv_len, causal, options.block_size) for pattern in patterns]
    made = tuple(drawn[plan % heads] for plan in range(plans))
    return BlockMask(made, q_len, kv_len, causal, options.block_size, patterns)


def _of_head(options: Options, head: int, kv_len: int) -> Pattern:
    seeded = options.model_construct(**{**options.__dict__, "seed": options.seed + 1000003 * head})
    return PATTERNS[options.pattern](seeded, kv_len)


def _with_window(options: Options, kv_len: int, window: int) -> Pattern:
    return PATTERNS[options.pattern](options.model_construct(**{**options.__dict__, "window": window}), kv_len)


def key(options: Options) -> tuple[Any, ...]:
    """All of them, to keep by what was made."""
    return tuple(getattr(options, name) for name in Options.model_fields)
