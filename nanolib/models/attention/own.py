"""Your own attention: a function `(q, k, v, causal) -> out`; and the names of functions of yours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pydantic
import torch
from torch import Tensor

from nanolib.measurement import BadInput, shown
from nanolib.models.user import imported_module, is_function_name
from nanolib.params import StrictModel


class Options(StrictModel):
    """Options of `own`.

    Attributes:
        call: `package.module:function`, which takes q, k, v and causal, shaped as in `attention.attend`, and returns the output.
    """

    NAME: ClassVar[str] = "attention_options"

    call: str

    @pydantic.field_validator("call")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        check_name("call", value)
        return value


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, options: Options
) -> Tensor:
    """Call the function; see `nanolib.models.attention.attend`.

    Raises:
        BadInput: There is no such function, or it returns something else than an output.
    """
    if scale is not None:  # the function has its own factor, head_dim ** -0.5
        q = q * (scale * q.shape[-1] ** 0.5)
    out = imported("call", options.call)(q, k, v, causal)
    if not isinstance(out, Tensor) or out.shape != q.shape:
        got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise BadInput(
            f"attention_options.call: {options.call} returned {got}; return shape {list(q.shape)}"
        )
    return out


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> None:
    """What a function computes is not known."""


def check_name(field: str, name: str) -> None:
    """Check the form of a function's name; nothing is imported.

    Raises:
        ValueError: It names no function.
    """
    if not is_function_name(name):
        raise ValueError(f"{field}: {shown(name)} names no function; write package.module:function")


@functools.cache
def imported(field: str, name: str) -> Callable[..., Any]:
    """The function that an option names, from the working directory or the environment.

    Raises:
        BadInput: It cannot be imported.
    """
    module_name, _, function = name.partition(":")
    try:
        found = getattr(imported_module(module_name), function, None)
    except (Exception, SystemExit) as error:  # it is the user's code
        raise BadInput(
            f"attention_options.{field}: {name} cannot be imported: {type(error).__name__}: {error}; "
            "install the module, or start in its folder"
        ) from error
    if not callable(found):
        raise BadInput(
            f"attention_options.{field}: {module_name} has no function {function}; name one that it has"
        )
    return found


def on_arrays(mask_mod: Callable[..., Tensor]) -> Callable[..., np.ndarray]:
    """A `mask_mod` of tensors, asked with arrays."""

    def keeps(*at: Any) -> np.ndarray:
        indices = torch.broadcast_tensors(*(torch.as_tensor(index) for index in at))
        return mask_mod(*indices).expand(indices[0].shape).cpu().numpy()

    return keeps
