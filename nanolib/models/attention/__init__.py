"""Compute every attention of nanolib through one function, `attend`.

`_KINDS` maps each name in `nanolib.config.ATTENTION_KINDS` to the options of an attention, and to a
function `attend(q, k, v, *, causal, options)`. Each pattern of the attention `sparse` is a function
in `patterns` or `dynamic`.

The last query has the position of the last key. Query i of q_len queries has the position
kv_len - q_len + i, as in decoding with a cache.
"""

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pydantic
import torch
from torch import Tensor

from nanolib.measurement import BadInput, quote
from nanolib.models.attention import dense, sparse
from nanolib.models.attention.block_mask import static_mask
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import Work, dense_work
from nanolib.models.user import check_function, import_callable
from nanolib.params import StrictModel

__all__ = [
    "Work",
    "attend",
    "check_shapes",
    "kinds",
    "parse_options",
    "shared_options",
    "work",
]


class OwnOptions(StrictModel):
    """Options of `own`.

    Attributes:
        call: Your function of q, k, v and causal, as `package.module:function`. The function
            must multiply scores by head_dim ** -0.5, and return the output.
    """

    NAME = "attention_options"

    call: Annotated[str, pydantic.AfterValidator(functools.partial(check_function, "call"))]


# nanolib imports your function once, outside the timed calls.
_import_call = functools.cache(functools.partial(import_callable, "attention_options.call"))


def _attend_by_own(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: OwnOptions) -> Tensor:
    """Compute attention by your own function `(q, k, v, causal) -> out`.

    Raises:
        BadInput: The function does not exist, or returns another shape or dtype than that of `q`.
    """
    out = _import_call(options.call)(q, k, v, causal)
    got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if got != list(q.shape) or out.dtype != q.dtype:
        raise BadInput(
            f"attention_options.call: {options.call} returned {got}; "
            f"return shape {list(q.shape)} in {q.dtype}"
        )
    return out


_KINDS = {
    "dense": (dense.Options, dense.attend),
    "flash_attn": (dense.FlashOptions, dense.attend_by_flash_attn),
    "flex": (sparse.FlexOptions, sparse.attend),
    "sparse": (sparse.Options, sparse.attend),
    "own": (OwnOptions, _attend_by_own),
}


def kinds() -> tuple[str, ...]:
    """Return the names that `attend` accepts as `kind`.

    Example:
        >>> kinds()
        ('dense', 'flash_attn', 'flex', 'sparse', 'own')
    """
    return tuple(_KINDS)


def _options_of(kind: str):
    if kind not in kinds():
        raise BadInput(
            f"attention_type: {quote(kind)} is not a known attention kind; "
            f"use one of {', '.join(_KINDS)}"
        )
    return _KINDS[kind][0]


def parse_options(kind: str, options=None):
    """Parse the options of an attention.

    Raises:
        BadInput: The attention or an option is unknown, or a value is not valid.

    Example:
        >>> parse_options("sparse", {"pattern": "window", "windw": 32})
        Traceback (most recent call last):
        nanolib.measurement.BadInput: ...windw...
    """
    model = _options_of(kind)
    if isinstance(options, model):
        return options
    if options and not isinstance(options, Mapping):
        raise BadInput(f"options: must map names to values, got {quote(options)}")
    return model(**(options or {}))


def shared_options(kind: str, bag: Mapping[str, Any]):
    """Select the options of one attention from a mapping that may have options of other attentions.

    Raises:
        BadInput: A name is not an option of any attention, or a value is not valid.

    Example:
        >>> shared_options("sparse", {"pattern": "window", "window": 32}).window
        32
    """
    mine = _options_of(kind).model_fields
    for name in bag:
        if not any(name in options.model_fields for options, _ in _KINDS.values()):
            raise BadInput(
                f"attention_options.{name}: is not an option of any attention kind; "
                f"{kind} takes {', '.join(mine)}"
            )
    return parse_options(kind, {name: value for name, value in bag.items() if name in mine})


def attend(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    options=None,
    scores: Tensor | None = None,
) -> Tensor:
    """Compute attention.

    Args:
        kind: Name of the attention, one of `kinds()`.
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim]. kv_heads must divide heads, and kv_len
            must be at least q_len.
        v: Values, with the shape of `k`.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor that multiplies the scores, or None for head_dim ** -0.5.
        options: Options of the attention, as a mapping or from `parse_options`.
        scores: Learned score per token, shape [batch, kv_len], for the pattern `dca`.

    Returns:
        Output, with the shape and dtype of `q`. Under autocast, only dense attention computes and
        returns the dtype of autocast, so convert q, k and v yourself before you compare.

    Raises:
        BadInput: The shapes, the dtype, the name or the options are not valid.
        Unsupported: This machine cannot run the attention.

    Example:
        >>> q, k, v = torch.rand(3, 1, 2, 128, 16)
        >>> options = {"pattern": "window", "window": 32}
        >>> attend("sparse", q, k, v, causal=True, options=options).shape
        torch.Size([1, 2, 128, 16])
    """
    check_shapes(q, k, v)
    _check_lengths(q.shape[2], k.shape[2])
    if scale is not None:  # Every kernel multiplies the scores by head_dim ** -0.5.
        q = q * (scale * q.shape[-1] ** 0.5)
    given = {"causal": causal, "options": parse_options(kind, options)}
    if scores is not None:
        given["scores"] = scores
    return _KINDS[kind][1](q, k, v, **given)


def work(
    kind: str, q_len: int, kv_len: int, *, causal: bool, options=None, heads: int = 1
) -> Work | None:
    """Count the query-key pairs and tiles that an attention mask keeps.

    Args:
        kind: Name of the attention, one of `kinds()`.
        q_len: Number of queries.
        kv_len: Number of keys.
        causal: Whether a query sees only keys at or before its own position.
        options: Options of the attention, as a mapping or from `parse_options`.
        heads: Number of query heads. If your own mask uses h, each head has its own mask.

    Returns:
        Counts per head on average, or None if the counts are unknown or depend on the input.

    Raises:
        BadInput: The name, a length or an option is not valid.

    Example:
        >>> options = {"pattern": "window", "window": 64}
        >>> kept = work("sparse", 1024, 1024, causal=True, options=options)
        >>> kept.kept / kept.total < 0.2
        True
    """
    _check_lengths(q_len, kv_len)
    options = parse_options(kind, options)
    if kind not in ("flex", "sparse"):
        return None if kind == "own" else dense_work(q_len, kv_len, causal)
    is_static = options.pattern in PATTERNS
    return static_mask(options, q_len, kv_len, causal, heads).work if is_static else None


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that the shapes and dtypes of q, k and v fit each other.

    Raises:
        BadInput: The shapes or dtypes of q, k and v do not fit each other.

    Example:
        >>> check_shapes(torch.rand(1, 2, 8, 16), torch.rand(1, 3, 8, 16), torch.rand(1, 3, 8, 16))
        Traceback (most recent call last):
        nanolib.measurement.BadInput: ...
    """
    same_dtype = q.is_floating_point() and q.dtype == k.dtype == v.dtype
    fits = same_dtype and q.dim() == k.dim() == 4 and k.shape == v.shape
    # Keys have the batch size and the head_dim of queries, and their heads divide the query heads.
    fits = fits and q.shape[::3] == k.shape[::3] and k.shape[1] and q.shape[1] % k.shape[1] == 0
    if not fits:
        found = ", ".join(f"{list(x.shape)} {x.dtype}" for x in (q, k, v))
        raise BadInput(
            f"q, k, v: {found} do not fit; give q [batch, heads, q_len, head_dim], k and v "
            "[batch, kv_heads, kv_len, head_dim], heads a multiple of kv_heads, and one "
            "floating-point dtype"
        )


def _check_lengths(q_len: int, kv_len: int):
    if not 1 <= q_len <= kv_len:
        raise BadInput(
            f"q, k: {q_len} queries over {kv_len} keys; give at least one query, "
            "and at least as many keys as queries"
        )
