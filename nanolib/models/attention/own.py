"""Compute attention by a function of yours, `(q, k, v, causal) -> out`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pydantic
import torch
from torch import Tensor

from nanolib.measurement import BadInput
from nanolib.models.attention.partial import scale_queries
from nanolib.models.functions import check_function, imported
from nanolib.params import StrictModel


class Options(StrictModel):
    """Options of `own`.

    Attributes:
        call: `package.module:function` of q, k, v and causal, with the shapes of
            `attention.attend`. It returns the output, and multiplies scores by head_dim ** -0.5.
    """

    NAME: ClassVar[str] = "attention_options"

    call: str

    @pydantic.field_validator("call")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        check_function("call", value)
        return value


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, options: Options
) -> Tensor:
    """Call the function. See `nanolib.models.attention.attend`.

    Raises:
        BadInput: There is no such function, or its result has another shape than `q`.
    """
    out = _function(options.call)(scale_queries(q, scale), k, v, causal)
    if not isinstance(out, Tensor) or out.shape != q.shape:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise BadInput(
            f"attention_options.call: {options.call} returned {got}; return shape {list(q.shape)}"
        )
    return out


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    """Import what `call` names, once for all timed calls."""
    return imported("attention_options.call", name)


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> None:
    """Return None: what a function of yours computes is unknown."""


def on_arrays(mask_mod: Callable[..., Tensor]) -> Callable[..., np.ndarray]:
    """Make a `mask_mod` of tensors take and return arrays."""

    def keeps(*at: Any) -> np.ndarray:
        indices = torch.broadcast_tensors(*(torch.as_tensor(index) for index in at))
        return mask_mod(*indices).expand(indices[0].shape).cpu().numpy()

    return keeps


def uses_index(mask_mod: Callable[..., Any], place: int) -> bool:
    """Return whether a `mask_mod` uses one of its indices in any operation.

    Args:
        mask_mod: A function of b, h, q_idx and kv_idx.
        place: Which of them, from 0.
    """
    used = []

    class Recorded(Tensor):
        @classmethod
        def __torch_function__(cls, *call: Any, **more: Any) -> Any:
            used.append(True)
            return super().__torch_function__(*call, **more)

    at = [torch.tensor(0) for _ in range(4)]
    at[place] = at[place].as_subclass(Recorded)
    mask_mod(*at)
    return bool(used)
