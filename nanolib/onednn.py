# ruff: noqa: UP045  TorchScript knows optional arguments by typing's name
"""Products in float32 by oneDNN, which torch leaves to MKL unless it compiles: on CPUs where MKL has no AVX-512, half as fast."""

from typing import Optional

import torch
from torch.utils.flop_counter import register_flop_formula

if torch.backends.mkldnn.is_available():

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
        """What `torch.nn.functional.linear` gives, x of shape [..., in], weight [out, in] of any strides; it has no gradient."""
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x_shape: torch.Size, weight_shape: torch.Size, *_: object, **__: object) -> int:
        return 2 * x_shape.numel() * weight_shape[0]

else:

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
        """What `torch.nn.functional.linear` gives."""
        return torch.nn.functional.linear(x, weight, bias)
