"""Fit the cost of sending: a time per message and a time per byte."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nanolib.stats.intervals import TooFewSamples


class LinkCost(NamedTuple):
    """The cost of sending: `alpha` per message and `beta` per byte.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte.
        residuals: Difference of each observation from the model, as a share of the observation.
    """

    alpha: float
    beta: float
    residuals: tuple[float, ...]

    def seconds(self, messages: float, sent_bytes: float) -> float:
        """Return the time of messages in a row, with their bytes in all."""
        return self.alpha * messages + self.beta * sent_bytes


def link_cost(messages: ArrayLike, sent_bytes: ArrayLike, seconds: ArrayLike) -> LinkCost:
    """Fit the α–β model: seconds ≈ α · messages + β · bytes, neither below zero.

    Args:
        messages: In a row, shape [n], n >= 2.
        sent_bytes: Shape [n].
        seconds: Shape [n], positive.

    Returns:
        Least squares of relative errors: short and long messages have equal weight.

    Raises:
        TooFewSamples: Fewer than two observations, or all with the same bytes per message.

    Source: Hockney (1994), The communication challenge for MPP.
    """
    m, b, s = (np.asarray(x, dtype=float) for x in (messages, sent_bytes, seconds))
    if len(s) < 2 or len(np.unique(b / m)) < 2:
        raise TooFewSamples(
            "one size of message does not separate the two costs; send at least two"
        )
    from scipy.optimize import nnls

    scale = np.array([1.0, float(b.max())])  # bytes and messages differ by many powers of ten
    design = np.stack([m, b / scale[1]], axis=1) / s[:, None]
    (alpha, beta), _ = nnls(design, np.ones_like(s))
    predicted = alpha * m + beta * b / scale[1]
    return LinkCost(
        float(alpha), float(beta / scale[1]), tuple(float(r) for r in (s - predicted) / s)
    )
