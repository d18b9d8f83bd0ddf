"""Emulate products in eight bits on hardware without them: cast the operands, then multiply."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanolib.models.fp8.casts import Cast, Recipe, round_to, scale_of


def _operand(x: Tensor, cast: Cast, dim: int) -> Tensor:
    """Cast an operand to 8 bits and back. Without a format, leave it."""
    if not cast.format:
        return x
    if cast.format == "bf16":
        return x.bfloat16().float()
    scale = scale_of(x, cast, dim)
    return round_to(x.float() * scale, cast.format).div_(scale)


class _EmulatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        rows = x.reshape(-1, x.shape[-1])
        out = torch.mm(_operand(rows, recipe.input, -1), _operand(weight, recipe.weight, -1).t())
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        rows, g = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        a, b = _operand(g, recipe.gradient, -1), _operand(weight, recipe.weight_for_input, 0)
        d_x = torch.mm(a, b).to(g.dtype)
        a = _operand(g, recipe.gradient_for_weight, 0)
        b = _operand(rows, recipe.input_for_weight, 0)
        d_weight = torch.mm(a.t(), b.to(a.dtype)).to(g.dtype)
        return d_x.reshape(x.shape), d_weight.to(weight.dtype), None


def emulated_linear(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    """Compute x · weightᵀ of operands in 8 bits, forward and backward.

    Args:
        x: Shape [..., in].
        weight: Shape [out, in].
        recipe: The casts.

    Returns:
        Shape [..., out], dtype of `x`.
    """
    return _EmulatedProduct.apply(x, weight, recipe)


class EmulatedLinear(nn.Linear):
    """A linear layer whose products are emulated.

    Under autocast its input is cast as for any other.

    Args:
        source: The layer whose weights it takes.
        recipe: The casts.
        rounded: Whether input and output are rounded to bf16 while the model's tensors stay
            float32, which a CPU multiplies faster.
    """

    def __init__(self, source: nn.Linear, recipe: Recipe, rounded: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight, self.bias = source.weight, source.bias
        self.recipe, self.rounded = recipe, rounded

    def forward(self, x: Tensor) -> Tensor:
        """x: shape [..., in_features]. The result has [..., out_features]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        dtype = x.dtype
        with torch.autocast(kind, enabled=False):
            x = x.bfloat16() if self.rounded else x
            out = emulated_linear(x, self.weight, self.recipe).to(dtype)
            return out if self.bias is None else out + self.bias.to(out.dtype)
