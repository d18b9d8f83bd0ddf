"""Dense attention by the flash-attn package where it is installed: 2.x, 3.x (`flash_attn_interface`), 4.x (`flash_attn.cute`)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import ClassVar

import torch

from nanolib.measurement import Unsupported
from nanolib.models.attention.work import Work, dense_work
from nanolib.params import StrictModel

INSTALL = "pip install flash-attn --no-build-isolation"
_DTYPES = (torch.float16, torch.bfloat16)


class Options(StrictModel):
    """`flash_attn` has no options."""

    NAME: ClassVar[str] = "attention_options"


def installed() -> bool:
    """Whether any version of it is."""
    return any(importlib.util.find_spec(name) is not None for name in ("flash_attn", "flash_attn_interface"))


@functools.cache
def kernel() -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
    """The package's function on q, k, v of shape [batch, length, heads, head_dim].

    Raises:
        Unsupported: The package is not installed, or has no such function.
    """
    if not installed():
        raise Unsupported(f"flash_attn is not installed; on a machine with CUDA: {INSTALL}")
    for module in ("flash_attn.cute", "flash_attn_interface", "flash_attn"):  # where several are there, the newest
        try:
            found = getattr(importlib.import_module(module), "flash_attn_func", None)
        except ImportError:
            continue
        if found is not None:
            return found
    raise Unsupported(f"flash_attn is installed and has no flash_attn_func; {INSTALL} brings a version that has")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None, options: Options
) -> torch.Tensor:
    """Dense attention; see `nanolib.models.attention.attend`."""
    kernel()
    if q.device.type != "cuda":
        raise Unsupported(f"flash_attn has no {q.device.type} kernel; use dense, whose flash backend has one")
    if q.dtype not in _DTYPES:
        raise Unsupported(f"flash_attn computes in float16 and bfloat16, not in {str(q.dtype).removeprefix('torch.')}")
    return call(q, k, v, causal=causal, scale=scale)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None) -> torch.Tensor:
    """The package's function on our shapes; it aligns causality at the end, as we do, since its version 2.1."""
    out = kernel()(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale=scale, causal=causal)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> Work:
    """Everything that causality allows."""
    return dense_work(q_len, kv_len, causal)
