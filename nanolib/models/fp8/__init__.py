"""Convert a model's linear layers to eight bits, and audit the conversion."""

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nanolib.measurement import BadInput, Unsupported, shown
from nanolib.models.fp8.casts import (
    BF16,
    CONTROLS,
    EVERYWHERE,
    FORMATS,
    RECIPES,
    Cast,
    EmulatedLinear,
    lost_shares,
    recipe_of,
    round_trip,
)
from nanolib.models.user import silent

_ALIGNMENT = 16  # Tensor cores multiply matrices whose sides are multiples of 16.


@dataclass(frozen=True)
class AuditedLayer:
    """One linear layer of a model.

    Attributes:
        name: Name of the layer in `named_modules`.
        converted: Whether the products of the layer are in eight bits.
        flops: FLOPs of the forward product per token.
    """

    name: str
    converted: bool
    flops: int


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """List a model's linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def audit(model: nn.Module) -> list[AuditedLayer]:
    """List the linear layers, and whether each was converted."""
    return [
        AuditedLayer(
            name,
            isinstance(layer, EmulatedLinear) or type(layer).__name__ == "Float8Linear",
            2 * layer.weight.numel(),
        )
        for name, layer in linear_layers(model).items()
    ]


@torch.no_grad()
def rows_by_layer(model: nn.Module, call: Callable[[], object]) -> Counter[str]:
    """Count the rows that one call of a model multiplies in each linear layer, by name.

    The count is 0 for a layer whose weights other code reads without calling the layer.
    """
    names, rows = {layer: name for name, layer in linear_layers(model).items()}, Counter()

    def count(layer: nn.Linear, _: Any, out: Tensor) -> None:
        rows[names[layer]] += out.numel() // layer.out_features

    hooks = [layer.register_forward_hook(count) for layer in names]
    call()
    for hook in hooks:
        hook.remove()
    return rows


def chosen_layers(model: nn.Module, excluded_modules: Sequence[str] = ("head",)) -> list[str]:
    """Return the names of the linear layers to convert: all layers that are not excluded.

    `nn.MultiheadAttention` never calls its output layer, so that layer stays in high precision.

    Args:
        model: Model that is not yet converted.
        excluded_modules: Patterns with `*` and `?` for layers that stay in high precision. A
            pattern matches the whole name of a layer, or the last part of the name.

    Raises:
        BadInput: A pattern matches no layer, no layer is left, or a side of a weight is not a
            multiple of 16.
    """
    layers = linear_layers(model)

    def matches(name: str, pattern: str) -> bool:
        last = name.rsplit(".", 1)[-1]
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(last, pattern)

    for pattern in excluded_modules:
        if not any(matches(name, pattern) for name in layers):
            known = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in layers))
            raise BadInput(
                f"excluded_modules: {shown(pattern)} matches no linear layer; the model has {known}"
            )
    chosen = [
        name
        for name, layer in layers.items()
        if not isinstance(layer, NonDynamicallyQuantizableLinear)
        and not any(matches(name, pattern) for pattern in excluded_modules)
    ]
    if not chosen:
        raise BadInput(
            f"excluded_modules: {shown(list(excluded_modules))} leaves no linear layer to convert; exclude fewer layers"
        )
    for name in chosen:
        out, into = layers[name].weight.shape
        if out % _ALIGNMENT or into % _ALIGNMENT:
            raise BadInput(
                f"excluded_modules: {name} is {out} x {into}, not a multiple of {_ALIGNMENT}; exclude or resize the layer"
            )
    return chosen


def native(device: torch.device | str) -> str:
    """Return why a device has no FP8 tensor cores, or an empty string."""
    device = torch.device(device)
    if device.type != "cuda":
        return f"{device.type} has no FP8 tensor cores; use an NVIDIA GPU of compute capability 8.9 or higher"
    if torch.version.hip:
        return "nanolib does not measure FP8 on AMD GPUs, because their formats differ (e4m3fnuz before MI350); use an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"compute capability {capability[0]}.{capability[1]} has no FP8 tensor cores; use a GPU of 8.9 or higher"
    return ""


def convert(
    model: nn.Module,
    recipe: str,
    *,
    excluded_modules: Sequence[str] = ("head",),
    emulate: bool | None = None,
    rounded: bool = False,
) -> list[AuditedLayer]:
    """Convert a model's linear layers in place. A layer with several names stays one layer.

    Code that reads the weight of a layer without calling the layer stays in high precision.

    Args:
        model: Model to convert. The weights keep their dtype.
        recipe: Name in `RECIPES` or `CONTROLS`. The recipes in `CONTROLS` need emulation.
        excluded_modules: Patterns of layers, as in `chosen_layers`. Controls in `EVERYWHERE`
            convert the excluded layers too.
        emulate: Whether to emulate the products. By default, nanolib emulates the products on devices
            without FP8 tensor cores.
        rounded: Whether emulated layers round to bf16, as in `EmulatedLinear`.

    Returns:
        Audit of all linear layers. Every chosen layer is converted.

    Raises:
        BadInput: A pattern is not valid, the recipe is unknown, or a layer was not converted.
        Unsupported: Without emulation, one of these conditions is true: the device has no FP8
            tensor cores, the recipe is a control, or torchao is not installed.
    """
    wanted, layers = recipe_of(recipe), linear_layers(model)
    places = [*model.named_modules(remove_duplicate=False)]
    chosen = chosen_layers(model, () if recipe in EVERYWHERE else excluded_modules)
    reason = native(next(model.parameters()).device)
    emulate = bool(reason) if emulate is None else emulate
    if emulate:
        for name in chosen:
            layer = EmulatedLinear(model.get_submodule(name), wanted, rounded)
            model.set_submodule(name, layer)
    else:
        if reason:
            raise Unsupported(reason)
        if recipe not in RECIPES:
            raise Unsupported(f"{recipe} is a control that no kernel computes; emulate the recipe")
        _convert_with_torchao(model, recipe, chosen)
    found = audit(model)
    if left := [layer.name for layer in found if layer.name in chosen and not layer.converted]:
        raise BadInput(
            f"excluded_modules: {', '.join(left)} stayed in high precision; exclude these layers too"
        )
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # torch's fast path, for relu and gelu only, would read weights without calling layers.
            module.activation_relu_or_gelu = 0
    converted = {layers[name]: model.get_submodule(name) for name in chosen}
    for name, layer in places:
        if layer in converted:
            model.set_submodule(name, converted[layer])
    return found


def _convert_with_torchao(
    model: nn.Module, recipe: str, chosen: list[str], emulate: bool = False
) -> None:
    try:
        with silent():  # The import logs the kernels that this machine cannot load.
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError:
        raise Unsupported("torchao is not installed; run: pip install torchao") from None

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in chosen
    )


def amdahl_bound(share: float) -> float:
    """Compute the largest speed-up if eight bits halve the time of a share of the FLOPs."""
    return 1 / (1 - share / 2)
