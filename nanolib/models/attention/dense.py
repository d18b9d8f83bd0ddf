"""Compute dense attention with a backend of torch's `scaled_dot_product_attention`, or flash-attn.

Version 4 of flash-attn is the pure Python package `flash-attn-4`. The first call of a kernel
compiles the kernel. Versions 2 and 3 are compiled extensions.
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, Self

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
Version = Literal["auto", 2, 3, 4]
_MODULES = {  # The newest version is first, because `auto` uses the first importable version.
    4: ("flash_attn.cute",),
    3: ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    2: ("flash_attn",),
}


class Options(StrictModel):
    """Options of `dense`.

    Attributes:
        backend: Backend of SDPA, or `auto` to let torch choose.
        impl: Kernels of the backend `flash`. The empty string selects torch's own kernels. `FA3`
            and `FA4` select the kernels of flash-attn 3 and 4.
    """

    NAME = "attention_options"

    backend: Literal[("auto", *_BACKENDS)] = "auto"
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
        except Exception as error:  # An import of a user's package can raise any exception.
            raise Unsupported(
                f"impl {impl} is not available ({type(error).__name__}: {error}); leave impl out"
            ) from error
        _active = impl


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: Options) -> Tensor:
    """Compute dense attention. See `nanolib.models.attention.attend`."""
    if options.impl and q.device.type != "cuda":
        raise Unsupported(f"impl {options.impl} has no {q.device.type} kernel; leave impl out")
    activate(options.impl)
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
                f"SDPA backend {options.backend} has no kernel for {q.dtype}, head_dim "
                f"{q.shape[-1]} on {q.device.type} and strides {q.stride()}; "
                "call contiguous on q, k and v, or use auto"
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


class FlashOptions(StrictModel):
    """Options of `flash_attn`.

    Attributes:
        version: Major version of flash-attn, or `auto` for the newest installed version.
    """

    NAME = "attention_options"

    version: Version = "auto"


@functools.cache
def _import_version(version: int) -> tuple[Callable[..., Any] | None, str]:
    """Return the function of one version, or None and the error of the import."""
    if version == 4 and _import_version(2)[0] is None:
        _skip_parent()
    errors = []
    for name in _MODULES[version]:
        try:
            return importlib.import_module(name).flash_attn_func, ""
        except Exception as error:  # A binary for another torch version can raise any exception.
            errors.append(f"{type(error).__name__}: {error}")
    return None, "; ".join(errors)


def _skip_parent():
    """Make version 4 importable if version 2, which has the same parent package, is broken."""
    spec = importlib.util.find_spec("flash_attn") if "flash_attn" not in sys.modules else None
    if spec and spec.submodule_search_locations:
        package = types.ModuleType("flash_attn")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["flash_attn"] = package


def flash_attn_version(version: Version = "auto") -> int | None:
    """Return the version that nanolib uses, or None if none can be imported."""
    wanted = _MODULES if version == "auto" else (version,)
    return next((number for number in wanted if _import_version(number)[0]), None)


def missing_flash_attn(version: Version = "auto") -> str:
    """Return why a version cannot be imported, and what to install."""
    wanted = _MODULES if version == "auto" else (version,)
    errors = "; ".join(f"version {number}: {_import_version(number)[1]}" for number in wanted)
    return (
        f"flash_attn, which cannot be imported ({errors}); "
        'on a machine with CUDA: pip install -e ".[cuda]"'
    )


def attend_by_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: FlashOptions
) -> Tensor:
    """Compute dense attention. See `nanolib.models.attention.attend`.

    Raises:
        Unsupported: The version is not installed, or has no kernel for the device, the dtype or
            head_dim.
    """
    version = flash_attn_version(options.version)
    if version is None:
        raise Unsupported(f"the attention needs {missing_flash_attn(options.version)}")
    if q.device.type != "cuda":
        raise Unsupported(f"flash_attn has no {q.device.type} kernel; use dense with backend flash")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(
            "flash_attn computes in float16 and bfloat16, "
            f"not in {str(q.dtype).removeprefix('torch.')}; use bfloat16"
        )
    return call_flash_attn(version, q, k, v, causal)


def call_flash_attn(version: int, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Call one version of flash-attn on q, k and v of shape [batch, heads, length, head_dim].

    Since version 2.1, flash-attn aligns the last query with the last key, as nanolib does.
    """
    function, inputs = _import_version(version)[0], (x.transpose(1, 2) for x in (q, k, v))
    try:
        out = function(*inputs, causal=causal)
    except AssertionError as error:  # Version 4 raises this error for a missing kernel.
        raise Unsupported(
            f"flash_attn {version} refuses the input ({error or 'without a reason'}); use dense"
        ) from error
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
