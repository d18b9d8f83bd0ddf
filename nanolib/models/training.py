"""Train a model to measure its loss. `experiments.model.steps` contains the timed training steps."""

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
    """Train a model with AdamW to predict the next token.

    Args:
        model: Model that maps ids to logits. The training changes the model's weights.
        batches: A batch of ids for each step, int64 [batch, length + 1], on the model's device.
        rate: Learning rate, or a function that maps the number of a step to a learning rate.
        autocast: Dtype of the matrix products, or None for the dtype of the weights. With float16,
            nanolib scales the loss.
        clip: Largest norm of all gradients together, or None for no limit.

    Returns:
        Loss before each step, in nats per token, float32, shape [steps].
    """
    weights = [*model.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-3 if callable(rate) else rate, fused=True)
    kind = weights[0].device.type
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
            nn.utils.clip_grad_norm_(weights, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return torch.stack(losses)
