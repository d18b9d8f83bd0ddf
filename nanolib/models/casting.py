"""A module's weights in another type."""

from __future__ import annotations

import torch
from torch import nn


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, its floating-point weights and buffers of the type; shared ones stay shared.

    `Module.to` does the same, but not for tensors without data, whose memory is to be planned.
    """
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the old one too: while it lives its id is its own

    def changed(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in made:
            new = x.detach().to(dtype)
            made[id(x)] = x, nn.Parameter(new, x.requires_grad) if isinstance(x, nn.Parameter) else new
        return made[id(x)][1]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, x in tensors.items():
                if x is not None and x.is_floating_point() and x.dtype is not dtype:
                    # which the module may keep elsewhere too, as recurrent ones do
                    setattr(part, name, changed(x))
    return module
