"""Measure how logits differ between runs, between batch sizes, and between prefill and decode."""

import contextlib
import math

import torch
from torch import Tensor, nn

from nanolib.measurement import Measurements, Unsupported, exact
from nanolib.models.generation import generation_of
from nanolib.models.user import logits_of

# nanolib compares the logits at this many last positions of each sequence.
_POSITIONS = 8


def determinism_rows(model: nn.Module, ids: Tensor) -> Measurements:
    """Compare logits between two runs, between batch sizes, and between prefill and decode.

    Args:
        model: Model in evaluation mode.
        ids: Tokens, int64, shape [batch, length]. nanolib splits each sequence into two sequences,
            because the comparison of batch sizes needs at least two.

    Yields:
        Rows of `ulp_difference` and `greedy_agreement` for the last positions, by scope.
    """
    length = ids.shape[1] // 2
    if (positions := min(_POSITIONS, length - 1)) < 1:
        return
    ids = ids[:, : 2 * length].reshape(-1, length)
    with contextlib.suppress(Unsupported):  # Not every model has a cache and finite logits.
        batch, alone = (_read(model, some, positions) for some in (ids, ids[:1]))
        yield from _rows("run_to_run", batch, _read(model, ids, positions))
        yield from _rows("batch", alone, batch[:1])
        yield from _rows("decode", alone, _decode(model, ids[:1], positions))


def _rows(scope: str, some: Tensor, others: Tensor) -> Measurements:
    row = {"scope": scope, "method": f"logits of the last {some.shape[1]} positions"}
    ulps, agreement = compare_logits(some, others)
    yield exact("ulp_difference", ulps, **row)
    yield exact("greedy_agreement", agreement, **row)


@torch.no_grad()
def _read(model: nn.Module, ids: Tensor, positions: int) -> Tensor:
    """Compute the last positions' logits in one pass, shape [batch, positions, vocab_size]."""
    logits = logits_of(model)(ids)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise Unsupported("the model returns no logits of shape [batch, length, vocab_size]")
    return logits[:, -positions:].cpu()


def _decode(model: nn.Module, ids: Tensor, positions: int) -> Tensor:
    """Compute the last positions' logits token by token, shape [batch, positions, vocab_size]."""
    generation, logits = generation_of(model, ids[:, :-positions], positions), []
    generation.prefill()
    for position in range(-positions, 0):
        generation.token = ids[:, position]
        logits.append(generation.next_logits())
    return torch.stack(logits, dim=1).cpu()


def compare_logits(some: Tensor, others: Tensor) -> tuple[float, float]:
    """Compare the logits of the same positions.

    Args:
        some: Logits of one computation, floating-point, shape [..., vocab_size].
        others: Logits of another computation, same shape and dtype.

    Returns:
        The largest difference of two logits, and the share of positions at which the same token
        has the largest logit. The unit of the difference is the unit in the last place (ULP) of
        the largest logit at a position, because the ULP of a logit near zero is tiny.

    Raises:
        Unsupported: A logit is not finite.
    """
    agreement = (some.argmax(dim=-1) == others.argmax(dim=-1)).double().mean().item()
    exponent = torch.maximum(some.abs(), others.abs()).amax(dim=-1, keepdim=True).frexp().exponent
    unit = torch.finfo(some.dtype).eps * 2.0 ** (exponent - 1)
    ulps = ((some.double() - others.double()).abs() / unit).max().item()
    if not math.isfinite(ulps):
        raise Unsupported("a logit is not finite")
    return ulps, agreement
