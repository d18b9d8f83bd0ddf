"""Compute dense attention with flash-attn 2, 3 or 4.

Version 4 is the pure Python package `flash-attn-4`. The first call of a kernel compiles the kernel.
Versions 2 and 3 are compiled extensions.
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from nanolib.measurement import Unsupported
from nanolib.params import StrictModel

Version = Literal["auto", 2, 3, 4]
_MODULES = {  # The newest version is first, because `auto` uses the first importable version.
    4: ("flash_attn.cute",),
    3: ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
    2: ("flash_attn",),
}


class Options(StrictModel):
    """Options of `flash_attn`.

    Attributes:
        version: Major version of flash-attn, or `auto` for the newest installed version.
    """

    NAME: ClassVar[str] = "attention_options"

    version: Version = "auto"


@functools.cache
def _imported(version: int) -> tuple[Callable[..., Any] | None, str]:
    """Return the function of one version, or None and the error of the import."""
    if version == 4 and _imported(2)[0] is None:
        _skip_parent()
    errors = []
    for name in _MODULES[version]:
        try:
            return importlib.import_module(name).flash_attn_func, ""
        except Exception as error:  # A binary for another torch version can raise any exception.
            errors.append(f"{type(error).__name__}: {error}")
    return None, "; ".join(errors)


def _skip_parent() -> None:
    """Make version 4 importable if version 2, which has the same parent package, is broken."""
    spec = importlib.util.find_spec("flash_attn") if "flash_attn" not in sys.modules else None
    if spec and spec.submodule_search_locations:
        package = types.ModuleType("flash_attn")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["flash_attn"] = package


def found_version(version: Version = "auto") -> int | None:
    """Return the version that `attend` uses, or None if none can be imported."""
    wanted = _MODULES if version == "auto" else (version,)
    return next((one for one in wanted if _imported(one)[0]), None)


def missing(version: Version = "auto") -> str:
    """Return why a version cannot be imported, and what to install."""
    wanted = _MODULES if version == "auto" else (version,)
    errors = "; ".join(f"version {one}: {_imported(one)[1]}" for one in wanted)
    return f'flash_attn, which cannot be imported ({errors}); on a machine with CUDA: pip install -e ".[cuda]"'


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, options: Options) -> Tensor:
    """Compute dense attention. See `nanolib.models.attention.attend`.

    Raises:
        Unsupported: The version is not installed, or has no kernel for the device, the dtype or
            head_dim.
    """
    version = found_version(options.version)
    if version is None:
        raise Unsupported(f"the attention needs {missing(options.version)}")
    if q.device.type != "cuda":
        raise Unsupported(f"flash_attn has no {q.device.type} kernel; use dense with backend flash")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(
            f"flash_attn computes in float16 and bfloat16, not in {str(q.dtype).removeprefix('torch.')}; use bfloat16"
        )
    return call(version, q, k, v, causal)


def call(version: int, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Call one version of flash-attn on q, k and v of shape [batch, heads, length, head_dim].

    Since version 2.1, flash-attn aligns the last query with the last key, as nanolib does.
    """
    function, inputs = _imported(version)[0], (x.transpose(1, 2) for x in (q, k, v))
    try:
        out = function(*inputs, causal=causal)
    except AssertionError as error:  # Version 4 raises this error for a missing kernel.
        raise Unsupported(
            f"flash_attn {version} refuses the input ({error or 'without a reason'}); use dense"
        ) from error
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
