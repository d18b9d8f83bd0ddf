"""How cost grows with size: the exponent of a power law, and a cost per message with one per byte."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit  # Student's quantiles; scipy.stats takes a second to import

from nanolib.stats.intervals import Interval, TooFewSamples


def scaling_exponent(size: ArrayLike, value: ArrayLike, confidence: float = 0.95) -> Interval:
    """Exponent p of value ≈ c · size^p, by least squares on logarithms.

    Args:
        size: Shape [n], positive, at least four of them different.
        value: Shape [n], positive.
        confidence: Nominal coverage.

    Returns:
        The exponent with its interval from Student's t on n − 2 degrees of freedom.

    Raises:
        TooFewSamples: Fewer than four different sizes: they are points, and no law.
    """
    x, y = np.log(np.asarray(size, dtype=float)), np.log(np.asarray(value, dtype=float))
    if len(np.unique(x)) < 4:
        raise TooFewSamples(
            f"{len(np.unique(x))} different sizes cannot give an exponent's interval; take at least 4"
        )
    if not np.ptp(y):
        return Interval(0.0, 0.0, 0.0)
    slope, constant = np.polyfit(x, y, 1)
    freedom, spread = len(x) - 2, float(((x - x.mean()) ** 2).sum())
    error = math.sqrt(float(((y - slope * x - constant) ** 2).sum()) / freedom / spread)
    reach = float(stdtrit(freedom, (1 + confidence) / 2)) * error
    return Interval(float(slope - reach), float(slope), float(slope + reach))


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
