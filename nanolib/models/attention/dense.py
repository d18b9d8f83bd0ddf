"""Compute dense attention by torch's scaled_dot_product_attention, with a choice of its backend."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanolib.measurement import Unsupported
from nanolib.models.attention.reference import causal_mask
from nanolib.models.attention.work import dense_work
from nanolib.params import StrictModel

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_CPU_BACKENDS = (
    "math",
    "flash",
)  # for the others torch falls back to math on CPU, without a warning


class Options(StrictModel):
    """Options of `dense`.

    Attributes:
        backend: SDPA kernel. `auto` lets torch choose.
    """

    NAME: ClassVar[str] = "attention_options"

    backend: Literal["auto", "math", "flash", "efficient", "cudnn"] = "auto"


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: Options) -> Tensor:
    """Compute dense attention. See `nanolib.models.attention.attend`."""
    if options.backend == "auto":
        return _call(q, k, v, causal)
    if q.device.type == "cpu" and options.backend not in _CPU_BACKENDS:
        raise Unsupported(
            f"SDPA backend {options.backend} has no CPU kernel; use {' or '.join(_CPU_BACKENDS)}"
        )
    with sdpa_kernel(_BACKENDS[options.backend]):
        try:
            return _call(q, k, v, causal)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise Unsupported(
                f"SDPA backend {options.backend} has no kernel for {q.dtype}, head_dim {q.shape[-1]} on {q.device.type}"
            ) from None


def _call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q_len, kv_len = q.shape[2], k.shape[2]
    # is_causal aligns at the start, nanolib at the end: they agree only for square scores. One query sees every key.
    square = q_len == kv_len
    mask = causal_mask(q_len, kv_len, q.device) if causal and not square and q_len > 1 else None
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and square, enable_gqa=q.shape[1] != k.shape[1]
    )


work = dense_work
