"""Compute attention by your own function `(q, k, v, causal) -> out`, and call your own masks."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pydantic
import torch
from torch import Tensor

from nanolib.measurement import BadInput
from nanolib.models.functions import check_function, imported
from nanolib.params import StrictModel
from nanolib.torch_internals import disable_dispatch_modes


class Options(StrictModel):
    """Options of `own`.

    Attributes:
        call: Your function of q, k, v and causal, as `package.module:function`. The function
            must multiply scores by head_dim ** -0.5, and return the output.
    """

    NAME: ClassVar[str] = "attention_options"

    call: str

    @pydantic.field_validator("call")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        check_function("call", value)
        return value


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: Options) -> Tensor:
    """Compute attention by your own function. See `nanolib.models.attention.attend`.

    Raises:
        BadInput: The function does not exist, or does not return a tensor with the shape of `q`.
    """
    out = _function(options.call)(q, k, v, causal)
    if not isinstance(out, Tensor) or out.shape != q.shape:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise BadInput(
            f"attention_options.call: {options.call} returned {got}; return shape {list(q.shape)}"
        )
    return out


@functools.cache
def _function(name: str) -> Callable[..., Any]:
    """Import your function once, outside the timed calls."""
    return imported("attention_options.call", name)


def on_arrays(mask_mod: Callable[..., Tensor]) -> Callable[..., np.ndarray]:
    """Convert a `mask_mod` of tensors to a `mask_mod` of numpy arrays.

    The new function evaluates the mask on the CPU, even in a memory plan, whose tensors have no
    data.
    """

    def keeps(*at: Any) -> np.ndarray:
        with on_cpu():
            indices = torch.broadcast_tensors(*map(torch.as_tensor, at))
            return mask_mod(*indices).expand(indices[0].shape).cpu().numpy()

    return keeps


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Create tensors on the CPU within the context, without any active dispatch mode."""
    with disable_dispatch_modes(), torch.device("cpu"):
        yield


def uses_index(mask_mod: Callable[..., Any], place: int) -> bool:
    """Return whether a `mask_mod` uses one of its indices in any operation.

    Args:
        mask_mod: Function of b, h, q_idx and kv_idx.
        place: Place of the index among the four arguments, from 0.
    """
    used = []

    class Recorded(Tensor):
        @classmethod
        def __torch_function__(cls, *call: Any, **more: Any) -> Any:
            used.append(True)
            return super().__torch_function__(*call, **more)

    with on_cpu():
        at = [torch.tensor(0) for _ in range(4)]
        at[place] = at[place].as_subclass(Recorded)
        mask_mod(*at)
    return bool(used)
