"""Train a model for its loss. `experiments.model.steps.Training` has the steps that are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nanolib.models.transformer import next_token_loss
from nanolib.models.user import logits_of

Rate = Callable[[int], float]


def train(
    model: nn.Module,
    batches: Iterable[Tensor],
    rate: float | Rate,
    *,
    autocast: torch.dtype | None = None,
    clip: float | None = None,
) -> Tensor:
    """Train by AdamW on the loss of the next token.

    Args:
        model: ids → logits. Its weights change.
        batches: One per step, int64 [batch, length + 1], on the model's device.
        rate: Learning rate, or step → learning rate.
        autocast: Dtype of the products, None for that of the weights. In float16 the loss is
            scaled.
        clip: Largest norm of all gradients, None for no limit.

    Returns:
        The loss before each step, nats per token, float32 [steps].
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3 if callable(rate) else rate, fused=True
    )
    kind = next(model.parameters()).device.type
    scaler = torch.amp.GradScaler(kind, enabled=autocast is torch.float16)
    forward, losses = logits_of(model), []
    for step, ids in enumerate(batches):
        if callable(rate):
            optimizer.param_groups[0]["lr"] = rate(step)
        with torch.autocast(kind, autocast, enabled=autocast is not None):
            loss = next_token_loss(forward, ids)
        losses.append(loss.detach().float())
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.stack(losses)
