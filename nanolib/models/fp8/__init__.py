"""Compute linear layers in 8-bit floating point: the cast, its products, and the conversion of a model.

A cast scales a tensor so that its largest magnitude becomes the format's largest value, clamps it,
and rounds to nearest even. `round_to` rounds by its own formula and `quantize` by torch. Tests
compare the two. Without FP8 tensor cores a product is emulated: (a / scale_a) @ (b / scale_b) in
float32, bit for bit torchao's own emulation.
"""

from nanolib.models.fp8.casts import (
    BF16,
    CONTROLS,
    FORMATS,
    RECIPES,
    Cast,
    quantize,
    recipe_of,
    round_to,
)
from nanolib.models.fp8.conversion import (
    amdahl_bound,
    audit,
    chosen_layers,
    convert,
    linear_layers,
    native,
)
from nanolib.models.fp8.emulation import EmulatedLinear, emulated_linear

__all__ = [
    "BF16",
    "CONTROLS",
    "FORMATS",
    "RECIPES",
    "Cast",
    "EmulatedLinear",
    "amdahl_bound",
    "audit",
    "chosen_layers",
    "convert",
    "emulated_linear",
    "linear_layers",
    "native",
    "quantize",
    "recipe_of",
    "round_to",
]
