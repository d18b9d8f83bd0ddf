"""Linear layers in float32 on a CPU by oneDNN: an optimisation, since torch asks MKL."""

from __future__ import annotations

import copy

import torch
from torch import nn

from nanolib import onednn
from nanolib.measurement import Unsupported
from nanolib.models.user import logits_of


class OneDnnLinear(nn.Linear):
    """torch's, but multiplied by oneDNN where no gradient is wanted, or on all cores in parts of the weight.

    Decoding reads each weight for one row per sequence. MKL, which torch asks, leaves such a product to one thread: 11 GB/s on
    two cores. oneDNN reads a weight with more outputs than inputs at 24, and any weight for several rows at 19. For one row and
    other weights MKL shares out a batch, and the weight is one of its parts: 20 to 23.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the weight, and the bias where there is one: shape [..., in_features] → [..., out_features]."""
        if not self._is_for_onednn(x):
            return super().forward(x)
        if max(x.numel(), self.out_features) > self.in_features:
            return onednn.linear(x, self.weight, self.bias)
        threads = torch.get_num_threads()
        if threads == 1 or self.out_features % threads or not self.weight.is_contiguous():
            return super().forward(x)
        row = x.reshape(1, 1, self.in_features).expand(threads, -1, -1)
        parts = self.weight.view(threads, -1, self.in_features)
        out = torch.bmm(row, parts.transpose(1, 2)).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _is_for_onednn(self, x: torch.Tensor) -> bool:
        return (
            not torch.is_grad_enabled()
            and x.numel() > 0
            and x.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        )


def with_onednn(model: nn.Module, ids: torch.Tensor) -> nn.Module:
    """A copy of a model, over the same weights, whose linear layers are `OneDnnLinear`.

    Args:
        model: Of any source.
        ids: What it reads, int64 [batch, length]; one forward pass shows that it goes through these layers.

    Raises:
        Unsupported: torch has no oneDNN; or the model has no linear layer in float32 on a CPU, runs none, or cannot be copied.
    """
    if not torch.backends.mkldnn.is_available():
        raise Unsupported("this torch was built without oneDNN")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    try:
        fast = copy.deepcopy(model, shared)
    except (TypeError, RuntimeError) as error:  # locks, files, tensors with a history
        raise Unsupported(f"{type(model).__name__} cannot be copied for oneDNN: {error}") from None
    found = [layer for layer in fast.modules() if type(layer) is nn.Linear and layer.weight.dtype == torch.float32]
    if not any(layer.weight.device.type == "cpu" for layer in found):
        raise Unsupported("oneDNN multiplies in float32 on a CPU; this model has no such linear layer")
    reached: list[nn.Module] = []
    hooks = [layer.register_forward_pre_hook(lambda layer, _: reached.append(layer)) for layer in found]
    for layer in found:
        layer.__class__ = OneDnnLinear
    with torch.no_grad():
        logits_of(fast)(ids)
    for hook in hooks:
        hook.remove()
    if not reached:
        raise Unsupported(f"the forward pass of {type(model).__name__} goes through none of its own linear layers")
    return fast
