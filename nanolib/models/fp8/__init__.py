"""8-bit floating point: the cast, the products it is used in, and a model whose linear layers use them.

A tensor is scaled so that its largest magnitude meets the format's largest value, clamped, and rounded to nearest even. `round_to`
does the rounding in the open; `quantise` leaves it to torch, and the tests hold the two together. Without FP8 tensor cores a
product is emulated: (a / scale_a) @ (b / scale_b) in float32, bit for bit torchao's own emulation.
"""

from nanolib.models.fp8.casts import (
    BF16,
    CONTROLS,
    EVERYWHERE,
    FORMATS,
    RECIPES,
    Cast,
    Quantised,
    Recipe,
    largest_over,
    quantise,
    recipe_of,
    round_to,
    scale_of,
)
from nanolib.models.fp8.conversion import (
    ALIGNMENT,
    AuditedLayer,
    amdahl_bound,
    audit,
    chosen_layers,
    convert,
    linear_layers,
    native,
)
from nanolib.models.fp8.emulation import EmulatedLinear, emulated_linear

__all__ = [
    "ALIGNMENT",
    "BF16",
    "CONTROLS",
    "EVERYWHERE",
    "FORMATS",
    "RECIPES",
    "AuditedLayer",
    "Cast",
    "EmulatedLinear",
    "Quantised",
    "Recipe",
    "amdahl_bound",
    "audit",
    "chosen_layers",
    "convert",
    "emulated_linear",
    "largest_over",
    "linear_layers",
    "native",
    "quantise",
    "recipe_of",
    "round_to",
    "scale_of",
]
