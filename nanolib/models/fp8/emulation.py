"""Products in eight bits where the hardware has none: operands are cast, and multiplied as they then are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanolib.models.fp8.casts import (
    Cast,
    Recipe,
    round_to,
    scale_of,
)


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
        d_x = torch.mm(
            _operand(g, recipe.gradient, -1), _operand(weight, recipe.weight_for_input, 0)
        ).to(g.dtype)
        a, b = (
            _operand(g, recipe.gradient_for_weight, 0),
            _operand(rows, recipe.input_for_weight, 0),
        )
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
        self.weight, self.bias, self.recipe, self.rounded = (
            source.weight,
            source.bias,
            recipe,
            rounded,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: shape [..., in_features]; the result has [..., out_features]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        dtype = x.dtype
        with torch.autocast(kind, enabled=False):
            out = emulated_linear(x.bfloat16() if self.rounded else x, self.weight, self.recipe).to(
                dtype
            )
            return out if self.bias is None else out + self.bias.to(out.dtype)
