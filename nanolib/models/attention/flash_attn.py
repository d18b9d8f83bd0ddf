"""Dense attention by the flash-attn package where it is installed: 2.x, 3.x (`flash_attn_interface`), 4.x (`flash_attn.cute`)."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanolib.measurement import Unsupported
from nanolib.models.attention.work import Work, dense_work
from nanolib.params import StrictModel

INSTALL = "pip install flash-attn --no-build-isolation"
_MODULES = (
    "flash_attn.cute",
    "flash_attn_interface",
    "flash_attn",
)  # where several are there, the newest


class Options(StrictModel):
    """`flash_attn` has no options."""

    NAME: ClassVar[str] = "attention_options"


@functools.cache
def kernel() -> Callable[..., Any] | None:
    """The package's function on q, k, v of shape [batch, length, heads, head_dim]; None where no version of it is installed."""
    for module in _MODULES:
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(module).flash_attn_func
    return None


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, options: Options
) -> Tensor:
    """Dense attention; see `nanolib.models.attention.attend`."""
    if kernel() is None:
        raise Unsupported(f"flash_attn is not installed; on a machine with CUDA: {INSTALL}")
    if q.device.type != "cuda":
        raise Unsupported(
            f"flash_attn has no {q.device.type} kernel; use dense, whose flash backend has one"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(
            f"flash_attn computes in float16 and bfloat16, not in {str(q.dtype).removeprefix('torch.')}"
        )
    return call(q, k, v, causal=causal, scale=scale)


def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> Tensor:
    """The package's function on our shapes; it aligns causality at the end, as we do, since its version 2.1."""
    out = kernel()(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> Work:
    """Everything that causality allows."""
    return dense_work(q_len, kv_len, causal)
