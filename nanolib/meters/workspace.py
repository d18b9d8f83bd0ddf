"""Compute the memory that a GPU kernel uses only inside one operation, which no tensor shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_ROWS, _COLUMNS = 128, 32  # FlashAttention rounds lengths and head sizes up to these


def workspace_bytes(operation: Any, args: Sequence[Any]) -> int:
    """Return the bytes that an operation needs in addition to its inputs and results.

    FlashAttention's backward pass sums the queries' gradients in float32. If heads come before
    positions, torch copies the output and its gradient. With grouped heads, it makes the keys' and
    values' gradients per head and sums them.

    Args:
        operation: As `__torch_dispatch__` receives it.
        args: Its arguments.

    Source: torch 2.11, `_flash_attention_backward` and `mha_bwd`; its allocator's peaks agree
    within 0.01 % (tests/meters/test_workspace.py).
    """
    if operation is not _FLASH_BACKWARD or args[1].device.type != "cuda":
        return 0
    grad_out, q, k, _, out = args[:5]
    batch, heads, q_len, head_dim = q.shape
    rows = batch * heads * _rounded(q_len, _ROWS)
    sums = 4 * rows * (_rounded(head_dim, _COLUMNS) + 1)
    copies = sum(x.nbytes for x in (grad_out, out) if not x.transpose(1, 2).is_contiguous())
    per_head = 2 * batch * heads * k.shape[2] * head_dim * k.element_size()
    return sums + copies + (per_head if k.shape[1] != heads else 0)


def _rounded(size: int, to: int) -> int:
    return math.ceil(size / to) * to
