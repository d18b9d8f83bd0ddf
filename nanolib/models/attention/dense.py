"""Compute dense attention with a backend of torch's `scaled_dot_product_attention`."""

from typing import ClassVar, Literal, Self

import pydantic
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanolib.measurement import Unsupported
from nanolib.models.attention.reference import causal_mask
from nanolib.params import StrictModel

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
# On CPU, torch silently uses `math` instead of the other backends.
_CPU_BACKENDS = ("math", "flash")


class Options(StrictModel):
    """Options of `dense`.

    Attributes:
        backend: Backend of SDPA, or `auto` to let torch choose.
        impl: Kernels of the backend `flash`. The empty string selects torch's own kernels. `FA3`
            and `FA4` select the kernels of flash-attn 3 and 4.
    """

    NAME: ClassVar[str] = "attention_options"

    backend: Literal["auto", "math", "flash", "efficient", "cudnn"] = "auto"
    impl: Literal["", "FA3", "FA4"] = ""

    @pydantic.model_validator(mode="after")
    def _flash_has_it(self) -> Self:
        if self.impl and self.backend != "flash":
            raise ValueError(
                f"impl: {self.impl} does not work with backend {self.backend}; set backend: flash"
            )
        return self


_active = ""  # Kernels that torch currently uses for the backend `flash`.


def activate(impl: str) -> None:
    """Choose the kernels of the backend `flash` for this process.

    A backward pass needs the kernels of its forward pass.

    Raises:
        Unsupported: flash-attn is not installed, or this version of torch cannot use its kernels.
    """
    global _active
    if impl == _active:
        return
    if _active:
        torch.nn.attention.restore_flash_attention_impl()
        _active = ""
    if impl:
        try:
            torch.nn.attention.activate_flash_attention_impl(impl)
        except Exception as error:  # An older torch lacks the function.
            raise Unsupported(
                f"impl {impl} is not available ({type(error).__name__}: {error}); leave impl out"
            ) from error
        _active = impl


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: Options) -> Tensor:
    """Compute dense attention. See `nanolib.models.attention.attend`."""
    on_gpu = q.device.type == "cuda"
    activate(options.impl if on_gpu else "")
    if options.impl and not on_gpu:
        raise Unsupported(f"impl {options.impl} has no {q.device.type} kernel; leave impl out")
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
                f"SDPA backend {options.backend} has no kernel for {q.dtype}, head_dim {q.shape[-1]} on {q.device.type} "
                f"and strides {q.stride()}; call contiguous on q, k and v, or use auto"
            ) from None


def _call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q_len, kv_len = q.shape[2], k.shape[2]
    # torch aligns the first query with the first key, and nanolib the last query with the last
    # key. Both masks are the same if q_len equals kv_len. A single query sees every key.
    square = q_len == kv_len
    mask = causal_mask(q_len, kv_len, q.device) if causal and not square and q_len > 1 else None
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and square,
        enable_gqa=q.shape[1] != k.shape[1],
    )
