"""Whether neighboring samples resemble each other, which makes intervals too narrow."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtrc


def ljung_box_p(samples: ArrayLike) -> float | None:
    """Return the p-value of "no autocorrelation up to lag min(10, n/5)"; None with n < 20 or constant samples.

    Args:
        samples: In the order taken, shape [n].

    Source: Ljung & Box (1978); agrees with statsmodels' acorr_ljungbox.
    """
    x = np.asarray(samples, dtype=float)
    n, lags = len(x), min(10, len(x) // 5)
    if n < 20 or np.ptp(x) == 0:
        return None
    x = x - x.mean()
    correlations = [float(x[lag:] @ x[:-lag] / (x @ x)) for lag in range(1, lags + 1)]
    q = n * (n + 2) * sum(r**2 / (n - lag) for lag, r in enumerate(correlations, 1))
    return float(chdtrc(lags, q))
