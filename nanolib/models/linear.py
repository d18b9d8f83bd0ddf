"""A linear layer that decodes on all cores."""

from __future__ import annotations

import torch
from torch import nn

from nanolib import onednn

# So few that reading the weight is what takes the time. With more rows oneDNN is twice as fast as MKL on some CPUs, but then so
# far from every other product of torch's that no user's model would compare.
_FEW_ROWS = 16


class Linear(nn.Linear):
    """torch's, but that few rows in float32 on a CPU are multiplied on all cores where no gradient is wanted.

    Decoding reads each weight for one row per sequence. MKL, which torch asks, leaves such a product to one thread: 11 GB/s on
    two cores. oneDNN reads a weight with more outputs than inputs at 24, and any weight for several rows at 19. For one row and
    other weights MKL shares out a batch, and the weight is one of its parts: 20 to 23.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product with the weight, and the bias where there is one: shape [..., in_features] → [..., out_features]."""
        if not self._has_few_rows(x):
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

    def _has_few_rows(self, x: torch.Tensor) -> bool:
        return (
            not torch.compiler.is_compiling()  # which chooses a kernel by itself, and breaks off at the number of threads
            and not torch.is_grad_enabled()
            and 0 < x.numel() <= _FEW_ROWS * self.in_features
            and x.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
        )
