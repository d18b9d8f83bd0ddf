"""Convert a model's linear layers to eight bits, and audit the conversion."""

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanolib.measurement import BadInput, Unsupported, quote
from nanolib.models.fp8.casts import (
    BF16,
    CONTROLS,
    EVERYWHERE,
    RECIPES,
    EmulatedLinear,
    EmulatedProduct,
    recipe_of,
)
from nanolib.models.user import silent

_ALIGNMENT = 16  # Tensor cores multiply matrices whose sides are multiples of 16.


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """List a model's linear layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def audit(model: nn.Module) -> dict[str, bool]:
    """Map the name of each linear layer to whether its products are in eight bits."""
    return {
        name: isinstance(layer, EmulatedLinear) or type(layer).__name__ == "Float8Linear"
        for name, layer in linear_layers(model).items()
    }


@torch.no_grad()
def rows_by_layer(model: nn.Module, call: Callable[[], object]) -> Counter[str]:
    """Count the rows that one call of a model multiplies in each linear layer, by name.

    The count is 0 for a layer whose weights other code reads without calling the layer.
    """
    rows = Counter()

    def count(name: str, layer: nn.Linear, _, out: Tensor):
        rows[name] += out.numel() // layer.out_features

    hooks = [
        layer.register_forward_hook(partial(count, name))
        for name, layer in linear_layers(model).items()
    ]
    call()
    for hook in hooks:
        hook.remove()
    return rows


def chosen_layers(model: nn.Module, excluded_modules: Sequence[str] = ("head",)) -> list[str]:
    """Return the names of the linear layers to convert: all layers that are not excluded.

    Args:
        model: Model that is not yet converted.
        excluded_modules: Patterns with `*` and `?` for layers that stay in high precision. A
            pattern matches the whole name of a layer, or the last parts of the name.

    Raises:
        BadInput: A pattern matches no layer, no layer is left, or a side of a weight is not a
            multiple of 16.
    """
    layers, excluded = linear_layers(model), set()
    for pattern in excluded_modules:
        matches = [name for name in layers if fnmatch.fnmatchcase(f".{name}", f"*.{pattern}")]
        excluded.update(matches)
        if not matches:
            known = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in layers))
            raise BadInput(
                f"excluded_modules: {quote(pattern)} matches no linear layer; the model has {known}"
            )
    chosen = [name for name in layers if name not in excluded]
    if not chosen:
        raise BadInput(
            f"excluded_modules: {quote(list(excluded_modules))} leaves no linear layer to convert; "
            "exclude fewer layers"
        )
    for name in chosen:
        out, into = layers[name].weight.shape
        if out % _ALIGNMENT or into % _ALIGNMENT:
            raise BadInput(
                f"excluded_modules: {name} is {out} x {into}, not a multiple of {_ALIGNMENT}; "
                "exclude or resize the layer"
            )
    return chosen


def native(device: torch.device | str) -> str:
    """Return why a device has no FP8 tensor cores, or an empty string."""
    device = torch.device(device)
    if device.type != "cuda":
        return (
            f"{device.type} has no FP8 tensor cores; "
            "use an NVIDIA GPU of compute capability 8.9 or higher"
        )
    if torch.version.hip:  # AMD's formats differ: e4m3fnuz before MI350.
        return "nanolib does not measure FP8 on AMD GPUs; use an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return (
            f"compute capability {capability[0]}.{capability[1]} has no FP8 tensor cores; "
            "use a GPU of 8.9 or higher"
        )
    return ""


def convert(
    model: nn.Module,
    recipe: str,
    *,
    emulate: bool,
    excluded_modules: Sequence[str] = ("head",),
    rounded: bool = False,
) -> dict[str, bool]:
    """Convert a model's linear layers in place.

    Code that reads the weight of a layer without calling the layer stays in high precision. A layer
    with several names is converted under its first name.

    Args:
        model: Model to convert. The weights keep their dtype.
        recipe: Name in `RECIPES` or `CONTROLS`. The recipes in `CONTROLS` need emulation.
        emulate: Whether to emulate the products.
        excluded_modules: Patterns of layers, as in `chosen_layers`. Controls in `EVERYWHERE`
            convert the excluded layers too.
        rounded: Whether emulated layers round to bf16, as in `EmulatedLinear`.

    Returns:
        Audit of all linear layers, as in `audit`.

    Raises:
        BadInput: A pattern is not valid.
        Unsupported: Without emulation, the device has no FP8 tensor cores.
    """
    chosen = chosen_layers(model, () if recipe in EVERYWHERE else excluded_modules)
    if emulate:
        for name in chosen:
            layer = EmulatedLinear(model.get_submodule(name), recipe_of(recipe), rounded)
            model.set_submodule(name, layer)
    else:
        if reason := native(next(model.parameters()).device):
            raise Unsupported(reason)
        _convert_with_torchao(model, recipe, chosen)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            # torch's fast path, for relu and gelu only, would read weights without calling layers.
            module.activation_relu_or_gelu = 0
    return audit(model)


def _convert_with_torchao(model: nn.Module, recipe: str, chosen: list[str], emulate: bool = False):
    with silent():  # The import logs the kernels that this machine cannot load.
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in chosen
    )
