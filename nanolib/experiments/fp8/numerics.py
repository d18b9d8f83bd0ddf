"""What 8 bits do to the products of a model, layer by layer: error, what vanishes and what saturates."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanolib.experiments.fp8.parity import SmallDecoderCase, small_decoder
from nanolib.measurement import Measurement, Provenance, exact
from nanolib.models import create_model, fp8, text
from nanolib.models.attention.reference import relative_error
from nanolib.models.training import train

VARIANTS = {
    f"{format} per {granularity}": fp8.Cast(format, granularity)
    for format in fp8.FORMATS
    for granularity in ("tensor", "row")
}
_OPERANDS = ("input", "weight", "gradient")


@dataclass(frozen=True)
class NumericsCase(SmallDecoderCase):
    """One way to cast, on the operands of a small decoder that has been trained for a while.

    Attributes:
        variant: A key of `VARIANTS`.
        steps: Of training, in bf16.
    """

    variant: str
    steps: int
    seq_len: int
    batch_size: int
    d_model: int
    num_layers: int
    seed: int

    def __str__(self) -> str:
        """What is cast how."""
        return f"numerics {self.variant}"

    @property
    def like(self) -> NumericsCase:
        """The same before any cast, a step of it."""
        return replace(self, variant="", steps=1, seed=0)

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Per layer and product the error of the product in float32, and per operand what its cast loses.

        Returns:
            `relative_error` and `sqnr` (dB) with scope `LAYER PRODUCT`; `underflow` and `overflow` with scope `LAYER OPERAND`.
        """
        for name, seen in _trained(replace(self, variant=""), params.corpus).items():
            yield from _error_rows(name, seen, VARIANTS[self.variant])


@dataclass(frozen=True)
class _Seen:
    """The operands of one linear layer at the last step."""

    input: torch.Tensor
    weight: torch.Tensor
    gradient: torch.Tensor


def _error_rows(name: str, seen: _Seen, cast: fp8.Cast) -> Iterator[Measurement]:
    x, weight, gradient = seen.input, seen.weight, seen.gradient
    # operand, dimension that the product sums over; each product is a @ b
    products = {
        "output": ((x, -1), (weight.t(), 0)),
        "input_gradient": ((gradient, -1), (weight, 0)),
        "weight_gradient": ((gradient.t(), -1), (x, 0)),
    }
    for product, ((a, a_dim), (b, b_dim)) in products.items():
        exactly = a @ b
        rounded = (
            fp8.quantise(a, cast, a_dim).dequantised() @ fp8.quantise(b, cast, b_dim).dequantised()
        )
        error = relative_error(rounded, exactly)
        common = {
            "scope": f"{name} {product}",
            "method": "emulated product against float32",
            "provenance": Provenance.EMULATED,
        }
        yield exact("relative_error", error, **common)
        yield exact("sqnr", -20 * math.log10(error) if error else 200.0, **common)
    for operand in _OPERANDS:
        found = fp8.quantise(getattr(seen, operand), cast)
        common = {
            "scope": f"{name} {operand}",
            "method": "counted",
            "provenance": Provenance.EMULATED,
        }
        yield exact("underflow", float(found.underflow), **common)
        yield exact("overflow", float(found.overflow), **common)


@functools.lru_cache(maxsize=4)
def _trained(case: NumericsCase, corpus: str) -> dict[str, _Seen]:
    """Train a decoder in bf16 and look at its linear layers: kept, since every variant looks at the same."""
    model = create_model(
        small_decoder(case.d_model, case.num_layers, case.seq_len), case.device, seed=case.seed
    )
    layers = {name: layer for name, layer in fp8.linear_layers(model).items() if name != "head"}
    last: dict[str, dict[str, torch.Tensor]] = {name: {} for name in layers}

    def note(name: str, operand: str, x: torch.Tensor) -> None:
        last[name][operand] = x.detach().flatten(0, -2).float()

    handles = []
    for name, layer in layers.items():

        def forward(
            module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor, name: str = name
        ) -> None:
            note(name, "input", args[0])
            note(name, "weight", module.weight)

        def backward(
            module: nn.Module, _: object, gradients: tuple[torch.Tensor, ...], name: str = name
        ) -> None:
            note(name, "gradient", gradients[0])

        handles += [
            layer.register_forward_hook(forward),
            layer.register_full_backward_hook(backward),
        ]
    generator = torch.Generator().manual_seed(case.seed)
    batches = text.batches(
        text.load(corpus), case.steps, case.batch_size, case.seq_len + 1, generator, case.device
    )
    train(model, batches, 1e-3, autocast=torch.bfloat16)
    for handle in handles:
        handle.remove()
    return {name: _Seen(**operands) for name, operands in last.items()}
