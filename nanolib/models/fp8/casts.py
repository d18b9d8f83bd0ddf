"""Casts to eight bits: formats, scales and recipes, and what a cast does to a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from nanolib.measurement import BadInput

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_BITS = {"e4m3": (3, -6), "e5m2": (2, -14)}  # of the mantissa; smallest exponent of a normal number
_FLOAT32_BITS, _EXPONENT = 23, 0x7F800000  # its mantissa, and where in it the exponent stands
_LEAST_AMAX = 1e-12


@dataclass(frozen=True)
class Cast:
    """How one operand of a product is cast.

    Attributes:
        format: `e4m3` (3 bits of mantissa, up to 448) or `e5m2` (2 bits, up to 57,344); `bf16` rounds to that, unscaled; empty
            leaves it as it is.
        granularity: One scale for the whole `tensor`, or one per `row` of those that the product sums over.
        power_of_2: Whether scales are rounded down to a power of two, which then scale without rounding.
        scaled: Whether it is scaled at all.
        off_by: A factor that the scale is wrong by.
    """

    format: Literal["e4m3", "e5m2", "bf16", ""] = "e4m3"
    granularity: Literal["tensor", "row"] = "tensor"
    power_of_2: bool = False
    scaled: bool = True
    off_by: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """How the operands of a linear layer's three products are cast.

    Attributes:
        input: For output = input · weightᵀ.
        weight: Likewise.
        gradient: Of the output, for the input's gradient = gradient · weight.
        weight_for_input: The weight there.
        gradient_for_weight: For the weight's gradient = gradientᵀ · input.
        input_for_weight: The input there.
    """

    input: Cast = Cast()
    weight: Cast = Cast()
    gradient: Cast = Cast("e5m2")
    weight_for_input: Cast = Cast()
    gradient_for_weight: Cast = Cast("e5m2")
    input_for_weight: Cast = Cast()


_ROW = Cast(granularity="row", power_of_2=True)
# torchao's names; what each means is in `torchao.float8.config`.
RECIPES = {
    "tensorwise": Recipe(),
    "rowwise": Recipe(_ROW, _ROW, _ROW, _ROW, _ROW, _ROW),
    "rowwise_with_gw_hp": Recipe(_ROW, _ROW, _ROW, Cast(power_of_2=True), Cast(""), Cast("")),
}


def _all(**changes: Any) -> Recipe:
    """The tensorwise recipe with every operand changed."""
    return Recipe(**{name: replace(value, **changes) for name, value in vars(Recipe()).items()})


# Recipes that are known to be bad: a comparison that does not find them worse would not find anything.
CONTROLS = {
    "e5m2_everywhere": _all(format="e5m2"),
    "no_scaling": _all(scaled=False),
    "scale_off_by_1024": _all(off_by=1024.0),
}
EVERYWHERE = ("e5m2_everywhere",)  # those that spare no layer, not even what a recipe keeps
# What products in bf16 do, with sums in float32: the base of comparisons where 8 bits are emulated.
BF16 = "bf16"


def recipe_of(name: str) -> Recipe:
    """A recipe or a control by its name.

    Raises:
        BadInput: There is none of that name.
    """
    if name == BF16:
        return _all(format="bf16")
    known = RECIPES | CONTROLS
    if name not in known:
        raise BadInput(f"recipe: {name!r} is not known; use one of {', '.join(known)}")
    return known[name]


def round_to(x: torch.Tensor, format: str) -> torch.Tensor:
    """The nearest value that a format has, of two equally near the one with an even mantissa.

    A number between 2^e and 2^(e+1) becomes a multiple of 2^(e − mantissa bits); below the smallest normal exponent the steps stay
    as they are there (subnormal numbers). Beside a number so much larger that its own last bit is that step, float32 does it.

    Args:
        x: Any shape, float32 or shorter.
        format: `e4m3` or `e5m2`.

    Returns:
        float32, shape of `x`; beyond the largest value that value, NaN for NaN.
    """
    bits, least = _BITS[format]
    largest = torch.finfo(FORMATS[format]).max
    wide = x.float().clamp(-largest, largest)
    power = (
        wide.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    )  # 2^e: without the mantissa's bits
    larger = power.clamp_(min=2.0**least).mul_(1.5 * 2.0 ** (_FLOAT32_BITS - bits))
    return (wide + larger).sub_(larger).copysign_(wide)


@dataclass(frozen=True)
class Quantized:
    """A tensor in 8 bits.

    Attributes:
        values: Of the format's type, shape of the tensor; the tensor itself where it was left as it is.
        scale: What it was multiplied by, float32, broadcast against it.
        underflow: Share of the elements that were not zero and now are.
        overflow: Share of the elements that were clamped: that lie further above the largest value than rounding reaches.
    """

    values: torch.Tensor
    scale: torch.Tensor
    underflow: torch.Tensor
    overflow: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """Back in its own range, float32."""
        return self.values.float() / self.scale


def largest_over(amax: torch.Tensor, format: str) -> torch.Tensor:
    """What brings the largest magnitude to the format's largest value; float64, shape of `amax`."""
    return torch.finfo(FORMATS[format]).max / amax.double().clamp(min=_LEAST_AMAX)


def scale_of(x: torch.Tensor, cast: Cast, dim: int) -> torch.Tensor:
    """What to multiply by: the format's largest value over the largest magnitude, in float64, then float32.

    Args:
        x: The tensor.
        cast: How it is cast.
        dim: With a scale per row, the dimension over which the maximum is taken: the one that the product sums over.
    """
    if not cast.scaled:
        return torch.full((), cast.off_by, device=x.device)
    amax = x.abs().amax() if cast.granularity == "tensor" else x.abs().amax(dim=dim, keepdim=True)
    scale = largest_over(amax, cast.format).float()
    if cast.power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale * cast.off_by


def _saturated(scaled: torch.Tensor, format: str) -> torch.Tensor:
    """Clamped, then rounded: a bare cast of what is too large differs by version."""
    largest = torch.finfo(FORMATS[format]).max
    return scaled.clamp(-largest, largest).to(FORMATS[format])


def quantize(x: torch.Tensor, cast: Cast, dim: int = -1) -> Quantized:
    """Largest magnitude → scale → clamp → round.

    Args:
        x: Any shape.
        cast: How.
        dim: As in `scale_of`.
    """
    scale = scale_of(x, cast, dim)
    scaled = x.float() * scale
    values = _saturated(scaled, cast.format)
    gone = ((values.float() == 0) & (x != 0)).float().mean()
    # up to half a step above the largest value rounding would bring it there anyway
    largest = torch.finfo(FORMATS[cast.format]).max
    step = 2.0 ** (math.frexp(largest)[1] - 1 - _BITS[cast.format][0])
    clamped = (scaled.abs() > largest + step / 2).float().mean()
    return Quantized(values, scale, gone, clamped)
