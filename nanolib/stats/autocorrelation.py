"""Whether neighbouring samples resemble each other, which makes intervals too narrow."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def ljung_box_p(samples: ArrayLike) -> float | None:
    """p-value of "no autocorrelation up to lag min(10, n/5)"; None with n < 20 or constant samples.

    Args:
        samples: In the order taken, shape [n].

    Source: Ljung & Box (1978), by statsmodels.
    """
    x = np.asarray(samples, dtype=float)
    if len(x) < 20 or np.ptp(x) == 0:
        return None
    from statsmodels.stats.diagnostic import (
        acorr_ljungbox,
    )  # 0.4 s to import: only when a measurement ends

    return float(acorr_ljungbox(x, lags=[min(10, len(x) // 5)])["lb_pvalue"].item())
