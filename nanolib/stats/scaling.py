"""What sending costs: a time per message, and a time per byte."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nanolib.stats.intervals import TooFewSamples


class LinkCost(NamedTuple):
    """What sending costs: `alpha` per message and `beta` per byte.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte.
        residuals: Of each observation, as a share of what was observed.
    """

    alpha: float
    beta: float
    residuals: tuple[float, ...]

    def seconds(self, messages: float, sent_bytes: float) -> float:
        """What so many messages in a row, of so many bytes together, take."""
        return self.alpha * messages + self.beta * sent_bytes


def link_cost(messages: ArrayLike, sent_bytes: ArrayLike, seconds: ArrayLike) -> LinkCost:
    """The α–β model: seconds ≈ α · messages + β · bytes, neither below zero.

    Args:
        messages: In a row, shape [n], n >= 2.
        sent_bytes: Shape [n].
        seconds: Shape [n], positive.

    Returns:
        Least squares of relative errors: short and long messages count alike.

    Raises:
        TooFewSamples: Fewer than two observations, or all with the same bytes per message.

    Source: Hockney (1994), The communication challenge for MPP.
    """
    m, b, s = (np.asarray(x, dtype=float) for x in (messages, sent_bytes, seconds))
    if len(s) < 2 or len(np.unique(b / m)) < 2:
        raise TooFewSamples(
            "one size of message cannot tell a cost per message from one per byte; send at least two"
        )
    from scipy.optimize import nnls

    scale = np.array([1.0, float(b.max())])  # bytes and messages differ by many powers of ten
    design = np.stack([m, b / scale[1]], axis=1) / s[:, None]
    (alpha, beta), _ = nnls(design, np.ones_like(s))
    predicted = alpha * m + beta * b / scale[1]
    return LinkCost(
        float(alpha), float(beta / scale[1]), tuple(float(r) for r in (s - predicted) / s)
    )
