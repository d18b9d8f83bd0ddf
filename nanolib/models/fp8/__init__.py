"""8-bit floating point: the cast, the products it is used in, and a model whose linear layers use them.

A tensor is scaled so that its largest magnitude meets the format's largest value, clamped, and rounded to nearest even. `round_to`
does the rounding in the open; `quantize` leaves it to torch, and the tests hold the two together. Without FP8 tensor cores a
product is emulated: (a / scale_a) @ (b / scale_b) in float32, bit for bit torchao's own emulation.
"""

from nanolib.models.fp8.casts import (
    BF16,
    CONTROLS,
    EVERYWHERE,
    FORMATS,
    RECIPES,
    Cast,
    Quantized,
    Recipe,
    largest_over,
    quantize,
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
    "Quantized",
    "Recipe",
    "amdahl_bound",
    "audit",
    "chosen_layers",
    "convert",
    "emulated_linear",
    "largest_over",
    "linear_layers",
    "native",
    "quantize",
    "recipe_of",
    "round_to",
    "scale_of",
]
