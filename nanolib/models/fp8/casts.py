"""Cast tensors to eight bits: formats, scales, recipes, and the errors of a cast."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nanolib.measurement import BadInput

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_BITS = {
    "e4m3": (3, -6),
    "e5m2": (2, -14),
}  # bits of the mantissa, smallest exponent of a normal number
_FLOAT32_BITS, _EXPONENT = 23, 0x7F800000  # bits of its mantissa, mask of its exponent
_LEAST_AMAX = 1e-12


@dataclass(frozen=True)
class Cast:
    """The cast of one operand of a product.

    Attributes:
        format: `e4m3` (3 bits of mantissa, up to 448), `e5m2` (2 bits, up to 57,344), or `bf16`,
            which is not scaled. Empty for no cast.
        granularity: One scale for the whole `tensor`, or one per `row` that the product sums over.
        power_of_2: Whether scales are rounded down to a power of two, so that scaling does not
            round.
        scaled: Whether the operand is scaled.
        off_by: Error of the scale, a factor.
    """

    format: Literal["e4m3", "e5m2", "bf16", ""] = "e4m3"
    granularity: Literal["tensor", "row"] = "tensor"
    power_of_2: bool = False
    scaled: bool = True
    off_by: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """The casts of the operands of a linear layer's three products.

    Attributes:
        input: The input in output = input · weightᵀ.
        weight: The weight in the same product.
        gradient: The output's gradient in the input's gradient = gradient · weight.
        weight_for_input: The weight in the same product.
        gradient_for_weight: The output's gradient in the weight's gradient = gradientᵀ · input.
        input_for_weight: The input in the same product.
    """

    input: Cast = Cast()
    weight: Cast = Cast()
    gradient: Cast = Cast("e5m2")
    weight_for_input: Cast = Cast()
    gradient_for_weight: Cast = Cast("e5m2")
    input_for_weight: Cast = Cast()


_ROW = Cast(granularity="row", power_of_2=True)
# torchao's names. `torchao.float8.config` defines them.
RECIPES = {
    "tensorwise": Recipe(),
    "rowwise": Recipe(_ROW, _ROW, _ROW, _ROW, _ROW, _ROW),
    "rowwise_with_gw_hp": Recipe(_ROW, _ROW, _ROW, Cast(power_of_2=True), Cast(""), Cast("")),
}


def _all(**changes: Any) -> Recipe:
    """Change every operand of the tensorwise recipe."""
    return Recipe(**{name: replace(value, **changes) for name, value in vars(Recipe()).items()})


# Recipes that are known to be bad: a valid comparison finds each of them worse.
CONTROLS = {
    "e5m2_everywhere": _all(format="e5m2"),
    "no_scaling": _all(scaled=False),
    "scale_off_by_1024": _all(off_by=1024.0),
}
EVERYWHERE = (
    "e5m2_everywhere",
)  # controls that convert all layers, those of `excluded_modules` too
# Products in bf16 with sums in float32: the baseline of emulated 8-bit products.
BF16 = "bf16"


def recipe_of(name: str) -> Recipe:
    """Return a recipe or a control by its name.

    Raises:
        BadInput: The name is unknown.
    """
    known = RECIPES | CONTROLS | {BF16: _all(format="bf16")}
    if name not in known:
        raise BadInput(f"recipe: {name!r} is not known; use one of {', '.join(known)}")
    return known[name]


def round_to(x: Tensor, format: str) -> Tensor:
    """Round to the nearest value of a format, ties to an even mantissa.

    A number between 2^e and 2^(e+1) becomes a multiple of 2^(e − mantissa bits). Below the smallest
    normal exponent the step is constant (subnormal numbers). Adding a number whose last bit is that
    step makes float32 round to it.

    Args:
        x: Any shape, float32 or narrower.
        format: `e4m3` or `e5m2`.

    Returns:
        float32, shape of `x`, clamped to the largest value. NaN for NaN.
    """
    bits, least = _BITS[format]
    largest = torch.finfo(FORMATS[format]).max
    wide = x.float().clamp(-largest, largest)
    # 2^e: without the mantissa's bits
    power = wide.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)
    larger = power.clamp_(min=2.0**least).mul_(1.5 * 2.0 ** (_FLOAT32_BITS - bits))
    return (wide + larger).sub_(larger).copysign_(wide)


@dataclass(frozen=True)
class Quantized:
    """A tensor in 8 bits.

    Attributes:
        values: In the format's dtype, shape of the tensor.
        scale: The factor on the tensor, float32, which broadcasts to its shape.
        underflow: Share of nonzero elements that became zero.
        overflow: Share of clamped elements, which are further above the largest value than rounding
            reaches.
    """

    values: Tensor
    scale: Tensor
    underflow: Tensor
    overflow: Tensor

    def dequantized(self) -> Tensor:
        """Divide by the scale, float32."""
        return self.values.float() / self.scale


def scale_of(x: Tensor, cast: Cast, dim: int) -> Tensor:
    """Compute a tensor's scale: the format's largest value over the largest magnitude, in float64, then float32.

    Args:
        x: The tensor.
        cast: Its cast.
        dim: For a scale per row, the dimension of the maximum, which the product sums over.
    """
    if not cast.scaled:
        return torch.full((), cast.off_by, device=x.device)
    amax = x.abs().amax() if cast.granularity == "tensor" else x.abs().amax(dim=dim, keepdim=True)
    largest = torch.finfo(FORMATS[cast.format]).max
    scale = (largest / amax.double().clamp(min=_LEAST_AMAX)).float()
    if cast.power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale * cast.off_by


def _saturate(scaled: Tensor, format: str) -> Tensor:
    """Clamp, then round: without the clamp, the cast of too large values differs by version."""
    largest = torch.finfo(FORMATS[format]).max
    return scaled.clamp(-largest, largest).to(FORMATS[format])


def quantize(x: Tensor, cast: Cast, dim: int = -1) -> Quantized:
    """Scale, clamp and round a tensor.

    Args:
        x: Any shape.
        cast: The cast.
        dim: As in `scale_of`.
    """
    scale = scale_of(x, cast, dim)
    scaled = x.float() * scale
    values = _saturate(scaled, cast.format)
    underflow = ((values.float() == 0) & (x != 0)).float().mean()
    # rounding alone maps up to half a step above the largest value to it
    largest = torch.finfo(FORMATS[cast.format]).max
    step = 2.0 ** (math.frexp(largest)[1] - 1 - _BITS[cast.format][0])
    clamped = (scaled.abs() > largest + step / 2).float().mean()
    return Quantized(values, scale, underflow, clamped)
