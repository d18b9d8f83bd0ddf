"""8-bit floating point: the cast, the products it is used in, and a model whose linear layers use them.

A tensor is scaled so that its largest magnitude meets the format's largest value, clamped, and rounded to nearest even. `round_to`
does the rounding in the open; `quantise` leaves it to torch, and the tests hold the two together. Without FP8 tensor cores a
product is emulated: (a / scale_a) @ (b / scale_b) in float32, bit for bit torchao's own emulation.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from nanolib.measurement import BadInput, Unsupported, shown

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_BITS = {"e4m3": (3, -6), "e5m2": (2, -14)}  # of the mantissa; smallest exponent of a normal number
_FLOAT32_BITS, _EXPONENT = 23, 0x7F800000  # its mantissa, and where in it the exponent stands
_LEAST_AMAX = 1e-12
ALIGNMENT = 16  # tensor cores take products whose sides are multiples of it


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


# the cast


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
    power = wide.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)  # 2^e: without the mantissa's bits
    larger = power.clamp_(min=2.0**least).mul_(1.5 * 2.0 ** (_FLOAT32_BITS - bits))
    return (wide + larger).sub_(larger).copysign_(wide)


@dataclass(frozen=True)
class Quantised:
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

    def dequantised(self) -> torch.Tensor:
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


def quantise(x: torch.Tensor, cast: Cast, dim: int = -1) -> Quantised:
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
    return Quantised(values, scale, gone, clamped)


def _operand(x: torch.Tensor, cast: Cast, dim: int) -> torch.Tensor:
    """What an emulated product takes: the tensor after a cast to 8 bits and back; itself where it is left as it is."""
    if not cast.format:
        return x
    if cast.format == "bf16":
        return x.bfloat16().float()
    scale = scale_of(x, cast, dim)
    return round_to(x.float() * scale, cast.format).div_(scale)


class _EmulatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(_operand(rows, recipe.input, -1), _operand(weight, recipe.weight, -1).t())
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        rows, g = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        d_x = torch.mm(_operand(g, recipe.gradient, -1), _operand(weight, recipe.weight_for_input, 0)).to(g.dtype)
        a, b = _operand(g, recipe.gradient_for_weight, 0), _operand(rows, recipe.input_for_weight, 0)
        d_weight = torch.mm(a.t(), b.to(a.dtype)).to(g.dtype)
        return d_x.reshape(x.shape), d_weight.to(weight.dtype), None


def emulated_linear(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The product x · weightᵀ of operands that went through 8 bits, forward and backward.

    Args:
        x: Shape [..., in].
        weight: Shape [out, in].
        recipe: How operands are cast.

    Returns:
        Shape [..., out], dtype of `x`.
    """
    return _EmulatedProduct.apply(x, weight, recipe)


class EmulatedLinear(nn.Linear):
    """A linear layer whose products are emulated; under autocast its input is cast as for any other.

    Args:
        source: Whose weights it takes over.
        recipe: How operands are cast.
        rounded: Whether input and output are rounded to bf16 while the model's tensors stay float32: a CPU multiplies those
            faster than bf16 ones.
    """

    def __init__(self, source: nn.Linear, recipe: Recipe, rounded: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias, self.recipe, self.rounded = source.weight, source.bias, recipe, rounded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: shape [..., in_features]; the result has [..., out_features]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        dtype = x.dtype
        with torch.autocast(kind, enabled=False):
            out = emulated_linear(x.bfloat16() if self.rounded else x, self.weight, self.recipe).to(dtype)
            return out if self.bias is None else out + self.bias.to(out.dtype)


# a model


@dataclass(frozen=True)
class AuditedLayer:
    """One linear layer of a model.

    Attributes:
        name: As `named_modules` has it.
        shape: (out, in).
        converted: Whether its products are in 8 bits.
        flops: Of its forward product, per token.
    """

    name: str
    shape: tuple[int, int]
    converted: bool
    flops: int


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """A model's linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def audit(model: nn.Module) -> list[AuditedLayer]:
    """Which linear layers were really converted."""
    return [
        AuditedLayer(name, tuple(layer.weight.shape), _is_float8(layer), 2 * layer.weight.numel())
        for name, layer in linear_layers(model).items()
    ]


def _is_float8(layer: nn.Module) -> bool:
    return isinstance(layer, EmulatedLinear) or type(layer).__name__ == "Float8Linear"


def chosen_layers(model: nn.Module, excluded_modules: Sequence[str] = ("head",)) -> list[str]:
    """The linear layers to convert: all but those kept in high precision.

    Args:
        model: Not yet converted.
        excluded_modules: Names, `*` and `?` allowed, of layers that stay as they are; with the last part of a name all
            layers of that part.

    Raises:
        BadInput: A pattern that no layer matches, no layer left to convert, or one whose sides are no multiples of 16.
    """
    layers = linear_layers(model)

    def matches(name: str, pattern: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rsplit(".", 1)[-1], pattern)

    for pattern in excluded_modules:
        if not any(matches(name, pattern) for name in layers):
            raise BadInput(
                f"excluded_modules: {shown(pattern)} matches no linear layer; the model has {', '.join(_kinds(layers))}"
            )
    chosen = [name for name in layers if not any(matches(name, pattern) for pattern in excluded_modules)]
    if not chosen:
        raise BadInput(
            f"excluded_modules: {shown(list(excluded_modules))} leaves no linear layer to convert; exclude fewer"
        )
    for name in chosen:
        if any(side % ALIGNMENT for side in layers[name].weight.shape):
            out, into = layers[name].weight.shape
            raise BadInput(
                f"excluded_modules: {name} is {out} x {into}, no multiple of {ALIGNMENT}; add it, or change the model"
            )
    return chosen


def _kinds(layers: dict[str, nn.Linear]) -> list[str]:
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in layers))


def native(device: torch.device | str) -> str:
    """Why a device has no FP8 tensor cores; empty where it has."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device.type} has no FP8 tensor cores; NVIDIA GPUs from compute capability 8.9 have"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 tensor cores; 8.9 and above have"
    return ""


def convert(
    model: nn.Module,
    recipe: str,
    *,
    excluded_modules: Sequence[str] = ("head",),
    emulate: bool | None = None,
    rounded: bool = False,
) -> list[AuditedLayer]:
    """Convert a model's linear layers in place.

    Args:
        model: Its weights stay in the type they have.
        recipe: A key of `RECIPES`, or of `CONTROLS` (emulated only).
        excluded_modules: As in `chosen_layers`; what spares no layer (`EVERYWHERE`) does not ask.
        emulate: Whether to emulate; by default where the device has no FP8 tensor cores.
        rounded: As in `EmulatedLinear`.

    Returns:
        The audit; every layer chosen is converted.

    Raises:
        BadInput: As `chosen_layers`, an unknown recipe, or a layer that was left unconverted.
        Unsupported: No tensor cores, and no emulation wanted; or a control without it.
    """
    wanted, chosen = recipe_of(recipe), chosen_layers(model, () if recipe in EVERYWHERE else excluded_modules)
    reason = native(next(model.parameters()).device)
    emulate = bool(reason) if emulate is None else emulate
    if emulate:
        for name in chosen:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, EmulatedLinear(model.get_submodule(name), wanted, rounded))
    else:
        if reason:
            raise Unsupported(reason)
        if recipe not in RECIPES:
            raise Unsupported(f"{recipe} is a control, which no kernel computes; emulate it")
        _convert_with_torchao(model, recipe, chosen)
    found = audit(model)
    if left := [layer.name for layer in found if layer.name in chosen and not layer.converted]:
        raise BadInput(
            f"excluded_modules: {', '.join(left)} stayed in high precision though not excluded; this torchao does not convert it"
        )
    return found


def _convert_with_torchao(model: nn.Module, recipe: str, chosen: list[str], emulate: bool = False) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # heavy: imported where it is used

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)


def amdahl_bound(share: float, gain: float = 2.0) -> float:
    """The most that a whole can gain when a share of it gets so many times faster.

    Args:
        share: Of the FLOPs that are converted, in [0, 1].
        gain: How many times faster they get: 2 by the formats' sizes, or the ratio of measured ceilings.
    """
    return 1 / (1 - share + share / gain)
