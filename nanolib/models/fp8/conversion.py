"""A model whose linear layers compute in eight bits: which are converted, by whom, and what the audit finds."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from nanolib.measurement import BadInput, Unsupported, shown
from nanolib.models.fp8.casts import EVERYWHERE, RECIPES, recipe_of
from nanolib.models.fp8.emulation import EmulatedLinear

ALIGNMENT = 16  # tensor cores take products whose sides are multiples of it


# the cast


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
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(
            name.rsplit(".", 1)[-1], pattern
        )

    for pattern in excluded_modules:
        if not any(matches(name, pattern) for name in layers):
            raise BadInput(
                f"excluded_modules: {shown(pattern)} matches no linear layer; the model has {', '.join(_kinds(layers))}"
            )
    chosen = [
        name for name in layers if not any(matches(name, pattern) for pattern in excluded_modules)
    ]
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
        return (
            f"{device.type} has no FP8 tensor cores; NVIDIA GPUs from compute capability 8.9 have"
        )
    if torch.version.hip:
        return "FP8 is not measured on AMD GPUs: their formats differ (e4m3fnuz before MI350), and nanolib has seen none"
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
    wanted, chosen = (
        recipe_of(recipe),
        chosen_layers(model, () if recipe in EVERYWHERE else excluded_modules),
    )
    reason = native(next(model.parameters()).device)
    emulate = bool(reason) if emulate is None else emulate
    if emulate:
        for name in chosen:
            parent, _, last = name.rpartition(".")
            setattr(
                model.get_submodule(parent),
                last,
                EmulatedLinear(model.get_submodule(name), wanted, rounded),
            )
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


def _convert_with_torchao(
    model: nn.Module, recipe: str, chosen: list[str], emulate: bool = False
) -> None:
    try:
        with _quiet():  # heavy: imported where it is used
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ModuleNotFoundError:
        raise Unsupported("torchao is not installed; run: pip install torchao") from None

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name in chosen
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torchao says of kernels that it cannot load here, and torch of torchao; NANOLIB_VERBOSE lets them speak."""
    loggers = (
        [] if os.environ.get("NANOLIB_VERBOSE") else [logging.getLogger(name) for name in _CHATTY]
    )
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


_CHATTY = ("torchao", "torch.utils._pytree")


def amdahl_bound(share: float, gain: float = 2.0) -> float:
    """The most that a whole can gain when a share of it gets so many times faster.

    Args:
        share: Of the FLOPs that are converted, in [0, 1].
        gain: How many times faster they get: 2 by the formats' sizes, or the ratio of measured ceilings.
    """
    return 1 / (1 - share + share / gain)
