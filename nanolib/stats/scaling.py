"""Fit a model of the time to send messages: a time per message and a time per byte."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from nanolib.stats.intervals import TooFewSamples


class LinkCost(NamedTuple):
    """Linear model of the time to send messages.

    Attributes:
        alpha: Time per message, in s.
        beta: Time per byte, in s.
        residuals: Observed minus predicted time, as a share of the observed time, shape [n].
    """

    alpha: float
    beta: float
    residuals: tuple[float, ...]

    def seconds(self, messages: float, sent_bytes: float) -> float:
        """Predict the time of consecutive messages with `sent_bytes` in total, in s."""
        return self.alpha * messages + self.beta * sent_bytes


def link_cost(messages: ArrayLike, sent_bytes: ArrayLike, seconds: ArrayLike) -> LinkCost:
    """Fit the model seconds ≈ α · messages + β · bytes, with α and β not below zero.

    The fit minimizes squared relative errors, so short and long messages have equal weight.

    Args:
        messages: Number of consecutive messages in each observation, shape [n], n >= 2.
        sent_bytes: Total bytes of these messages, shape [n].
        seconds: Time of each observation, in s, shape [n], above 0.

    Raises:
        TooFewSamples: All observations have the same number of bytes per message.

    Source: Hockney (1994), The communication challenge for MPP.
    """
    m, b, s = (np.asarray(x, dtype=float) for x in (messages, sent_bytes, seconds))
    if len(np.unique(b / m)) < 2:
        raise TooFewSamples(
            "messages of one size do not separate alpha from beta; send messages of several sizes"
        )
    from scipy.optimize import nnls

    # The solver is inaccurate if the columns differ by powers of ten, so nanolib scales the bytes.
    most = float(b.max())
    design = np.stack([m, b / most], axis=1) / s[:, None]
    (alpha, beta), _ = nnls(design, np.ones_like(s))
    residuals = 1 - design @ (alpha, beta)
    return LinkCost(float(alpha), float(beta / most), tuple(residuals.tolist()))
