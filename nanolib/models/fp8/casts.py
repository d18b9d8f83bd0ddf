"""Define formats, scales and recipes of 8-bit casts, and emulate products of cast operands.

A cast scales the largest magnitude of a tensor to the largest value of the format, clamps the
tensor, and rounds to nearest even. Without FP8 tensor cores, nanolib emulates a product as
(a / scale_a) @ (b / scale_b) in float32. The result equals torchao's own emulation bit for bit.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_LEAST_AMAX = 1e-12


@dataclass(frozen=True)
class Cast:
    """The cast of one operand of a product.

    Attributes:
        format: Format of the cast: `e4m3` for values up to 448, `e5m2` for values up to 57,344,
            `bf16` without a scale, or empty for no cast.
        granularity: Values that share one scale: `tensor` for all values, or `row` for each row.
        power_of_2: Whether to round scales down to a power of two, because multiplication by a
            power of two is exact.
        scaled: Whether to scale the operand.
        off_by: Factor of a deliberate error in the scale, for controls.
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
        input: Cast of the input in output = input · weightᵀ.
        weight: Cast of the weight in output = input · weightᵀ.
        gradient: Cast of the output's gradient in the product gradient · weight.
        weight_for_input: Cast of the weight in the product gradient · weight.
        gradient_for_weight: Cast of the output's gradient in the product gradientᵀ · input.
        input_for_weight: Cast of the input in the product gradientᵀ · input.
    """

    input: Cast = Cast()
    weight: Cast = Cast()
    gradient: Cast = Cast("e5m2")
    weight_for_input: Cast = Cast()
    gradient_for_weight: Cast = Cast("e5m2")
    input_for_weight: Cast = Cast()


_ROW = Cast(granularity="row", power_of_2=True)
# `torchao.float8.config` defines these recipes under the same names.
RECIPES = {
    "tensorwise": Recipe(),
    "rowwise": Recipe(_ROW, _ROW, _ROW, _ROW, _ROW, _ROW),
    "rowwise_with_gw_hp": Recipe(_ROW, _ROW, _ROW, Cast(power_of_2=True), Cast(""), Cast("")),
}


def _all(**changes) -> Recipe:
    """Return the recipe `tensorwise` with these changes to every cast."""
    return Recipe(**{name: replace(value, **changes) for name, value in vars(Recipe()).items()})


# These recipes are known to be bad, so a valid comparison finds each worse than bf16.
CONTROLS = {
    "e5m2_everywhere": _all(format="e5m2"),
    "no_scaling": _all(scaled=False),
    "scale_off_by_1024": _all(off_by=1024.0),
}
# Controls that convert all layers, including those in `excluded_modules`.
EVERYWHERE = ("e5m2_everywhere",)
# The baseline of emulated 8-bit products has operands in bf16 and sums in float32.
BF16 = "bf16"


def recipe_of(name: str) -> Recipe:
    """Return a recipe or a control by its name, or the baseline by the name `BF16`."""
    return (RECIPES | CONTROLS | {BF16: _all(format="bf16")})[name]


def round_to(x: Tensor, format: str) -> Tensor:
    """Round to the nearest value of a format, with ties to an even mantissa.

    A number between 2^e and 2^(e+1) becomes a multiple of the step 2^(e − mantissa bits). Below the
    smallest normal exponent, the step is constant (subnormal numbers). To round to a step, nanolib
    adds and then subtracts a float32 number whose last bit has the size of the step.

    Args:
        x: Tensor of any shape, float32 or narrower.
        format: Format to round to, `e4m3` or `e5m2`.

    Returns:
        The rounded values, float32, clamped to the format's largest value. NaN stays NaN.
    """
    info = torch.finfo(FORMATS[format])
    wide = x.float().clamp(info.min, info.max)
    # Without the 23 bits of float32's mantissa, the number is 2^e.
    power = wide.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    larger = power.clamp_(min=info.smallest_normal).mul_(1.5 * 2.0**23 * info.eps)
    return (wide + larger).sub_(larger).copysign_(wide)


def scale_of(x: Tensor, cast: Cast, dim: int) -> Tensor:
    """Compute the scale of a cast, float32: the format's largest value / the largest magnitude.

    Args:
        x: Tensor to cast.
        cast: Cast of the tensor.
        dim: Dimension that the product sums over. The values along `dim` form a row.
    """
    if not cast.scaled:
        return torch.ones((), device=x.device)
    amax = x.abs().amax() if cast.granularity == "tensor" else x.abs().amax(dim=dim, keepdim=True)
    largest = torch.full((), torch.finfo(FORMATS[cast.format]).max, device=x.device)
    # torchao divides in float64 and then rounds to float32. The resulting bits are the same.
    scale = largest / amax.float().clamp_(min=_LEAST_AMAX)
    if cast.power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return scale if cast.off_by == 1 else scale * cast.off_by


def round_trip(x: Tensor, cast: Cast, dim: int) -> Tensor:
    """Cast an operand, and divide the result by the scale. Without a format, return `x` itself.

    Args:
        x: Tensor of any shape.
        cast: The cast of the operand.
        dim: Dimension that the product sums over.
    """
    if not cast.format:
        return x
    if cast.format == "bf16":
        return x.bfloat16().float()
    x = x.float()
    scale = scale_of(x, cast, dim)
    return round_to(x * scale, cast.format).div_(scale)


def _cast_twice(x: Tensor, first: Cast, second: Cast) -> tuple[Tensor, Tensor]:
    """Cast an operand of two products, one that sums over columns and one that sums over rows."""
    cast = round_trip(x, first, -1)
    if first == second and first.granularity == "tensor":
        return cast, cast
    return cast, round_trip(x, second, 0)


class EmulatedProduct(torch.autograd.Function):
    """Compute x · weightᵀ with operands in eight bits, forward and backward.

    `apply` takes x (shape [rows, in]), the weight (shape [out, in]), and the recipe. The result has
    shape [rows, out] and the dtype of x.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        """Cast and multiply the operands of the output."""
        ctx.recipe = recipe
        a, a_for_weight = _cast_twice(x, recipe.input, recipe.input_for_weight)
        b, b_for_input = _cast_twice(weight, recipe.weight, recipe.weight_for_input)
        ctx.save_for_backward(a_for_weight, b_for_input)
        return torch.mm(a, b.t()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Cast and multiply the operands of both gradients."""
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        g, g_for_weight = _cast_twice(gradient, recipe.gradient, recipe.gradient_for_weight)
        of_weight = torch.mm(g_for_weight.t(), x.to(g_for_weight.dtype))
        # Tensor cores would round each gradient to the dtype of x, which is that of `gradient`.
        return torch.mm(g, weight).to(gradient.dtype), of_weight.to(gradient.dtype), None


class EmulatedLinear(nn.Linear):
    """Linear layer that emulates matrix products in eight bits.

    Under autocast, the layer casts its input as other linear layers do.

    Args:
        source: Linear layer that provides the weights.
        recipe: Casts of the operands.
        rounded: Whether to round input and output to bf16. The model's tensors stay float32,
            because a CPU multiplies float32 faster.
    """

    def __init__(self, source: nn.Linear, recipe: Recipe, rounded: bool = False):
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self.recipe, self.rounded = recipe, rounded

    def forward(self, x: Tensor) -> Tensor:
        """Map x, shape [..., in_features], to shape [..., out_features]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16 if self.rounded else x.dtype)
        with torch.autocast(kind, enabled=False):
            out = EmulatedProduct.apply(rows, self.weight, self.recipe).to(x.dtype)
        out = out.reshape(*x.shape[:-1], -1)
        return out if self.bias is None else out + self.bias.to(out.dtype)
