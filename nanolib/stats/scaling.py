"""Scaling exponents: the slope of a power law and its interval."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from nanolib.stats.intervals import Interval, TooFewSamples


def scaling_exponent(size: ArrayLike, value: ArrayLike, confidence: float = 0.95) -> Interval:
    """Exponent p of value ≈ c · size^p, by least squares on logarithms.

    Args:
        size: Shape [n], positive, at least three of them different.
        value: Shape [n], positive.
        confidence: Nominal coverage.

    Returns:
        The exponent with its interval from Student's t on n − 2 degrees of freedom.

    Raises:
        TooFewSamples: Fewer than three different sizes: a line through two points has no interval.
    """
    x, y = np.log(np.asarray(size, dtype=float)), np.log(np.asarray(value, dtype=float))
    if len(np.unique(x)) < 3:
        raise TooFewSamples(f"{len(np.unique(x))} different sizes cannot give an exponent's interval; take at least 3")
    from scipy.stats import linregress, t  # a second to import, and only a report needs it

    fit = linregress(x, y)
    error = fit.stderr if np.ptp(y) else 0.0  # scipy has no error for values that are all the same
    reach = float(t.ppf((1 + confidence) / 2, len(x) - 2) * error)
    return Interval(float(fit.slope - reach), float(fit.slope), float(fit.slope + reach))
