"""Measure the error, underflow and overflow of FP8 casts in each layer of a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanolib.experiments.fp8.parity import SmallDecoderCase
from nanolib.measurement import Measurement, Provenance, exact
from nanolib.models import create_model, fp8
from nanolib.models.attention.reference import relative_error
from nanolib.models.training import train

VARIANTS = {
    f"{format} per {granularity}": fp8.Cast(format, granularity)
    for format in fp8.FORMATS
    for granularity in ("tensor", "row")
}


@dataclass(frozen=True)
class NumericsCase(SmallDecoderCase):
    """One cast of the operands of a small decoder after some training.

    Attributes:
        variant: A key of `VARIANTS`.
        steps: Training steps, in bf16.
    """

    variant: str
    steps: int
    seq_len: int
    batch_size: int
    d_model: int
    num_layers: int
    seed: int

    def __str__(self) -> str:
        """Return the name of the cast."""
        return f"numerics {self.variant}"

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Measure the error of each product against float32, and the loss of each operand.

        Yields:
            `relative_error` and `sqnr` (dB) with scope `LAYER PRODUCT`, `underflow` and `overflow`
            with scope `LAYER OPERAND`.
        """
        for name, seen in _trained(replace(self, variant=""), params.corpus).items():
            yield from _error_rows(name, seen, VARIANTS[self.variant])


def _error_rows(name: str, seen: dict[str, torch.Tensor], cast: fp8.Cast) -> Iterator[Measurement]:
    x, weight, gradient = seen["input"], seen["weight"], seen["gradient"]
    # operands with the dimension that the product sums over. Each product is a @ b
    products = {
        "output": ((x, -1), (weight.t(), 0)),
        "input_gradient": ((gradient, -1), (weight, 0)),
        "weight_gradient": ((gradient.t(), -1), (x, 0)),
    }
    for product, pair in products.items():
        rounded = [fp8.round_trip(x, cast, dim) for x, dim in pair]
        error = relative_error(rounded[0] @ rounded[1], pair[0][0] @ pair[1][0])
        common = {"scope": f"{name} {product}", "method": "emulated product against float32"}
        yield _emulated("relative_error", error, **common)
        yield _emulated("sqnr", -20 * math.log10(error) if error else 200.0, **common)
    for operand, values in seen.items():
        underflow, overflow = fp8.lost_shares(values, cast)
        common = {"scope": f"{name} {operand}", "method": "counted"}
        yield _emulated("underflow", underflow, **common)
        yield _emulated("overflow", overflow, **common)


_emulated = functools.partial(exact, provenance=Provenance.EMULATED)


@functools.lru_cache(maxsize=4)
def _trained(case: NumericsCase, corpus: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train a decoder in bf16 and return the operands of its linear layers at the last step.

    The result is cached, since all variants share it.
    """
    model = create_model(case.config, case.device, seed=case.seed)
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for name, layer in fp8.linear_layers(model).items():
        if name != "head":
            seen[name] = {}
            layer.register_forward_hook(functools.partial(_note_operands, seen[name]))
    train(model, case.batches(corpus, case.seed), 1e-3, autocast=torch.bfloat16)
    return seen


def _note_operands(
    seen: dict[str, torch.Tensor],
    layer: nn.Module,
    args: tuple[torch.Tensor, ...],
    out: torch.Tensor,
) -> None:
    """Store the operands of a linear layer in a step, float32 [tokens, features]."""

    def note(operand: str, x: torch.Tensor) -> None:
        seen[operand] = x.detach().flatten(0, -2).float()

    note("input", args[0])
    note("weight", layer.weight)
    out.register_hook(lambda gradient: note("gradient", gradient))
