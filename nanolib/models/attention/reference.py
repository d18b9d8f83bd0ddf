"""Compute dense attention with a mask in float64: the slow reference that every kind is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Compute softmax(scale · q kᵀ where mask) v in float64. A row without any key gives zero.

    Args:
        q: Shape [batch, heads, q_len, head_dim].
        k: Shape [batch, kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        mask: True where a query may see a key, shape [q_len, kv_len].
        scale: Factor on the scores. None means head_dim ** -0.5.

    Returns:
        Shape of `q`, float64.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return torch.nan_to_num(weights, nan=0.0) @ v


def causal_mask(q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Make the causal mask: True if key j is at or before query i's position kv_len - q_len + i.

    Shape [q_len, kv_len].
    """
    position = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    return torch.arange(kv_len, device=device)[None, :] <= position


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Compute ‖out − reference‖ / ‖reference‖ in float64."""
    if out.device.type == "mps":  # it has no float64
        out, reference = out.cpu(), reference.cpu()
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm().clamp_min(1e-300))
