"""How other harnesses decide whether B is slower than A, from the calls that they would have timed: A first, then B.

Each rule takes call times of A and B in the order taken, seconds. Where pyperf and torch have code that decides, it does.
"""

import math

import numpy as np
import torch.utils.benchmark
from pyperf._utils import is_significant
from scipy.stats import mannwhitneyu, ttest_ind

GUARD = 0.03  # the change from which anything is called; the same for all, so that the rules alone differ
_VALUE_S = 0.1  # pyperf: one value is the mean over at least so long


def pyperf_compare(a: np.ndarray, b: np.ndarray) -> bool:
    """`pyperf compare_to`: Student's t on values of 100 ms."""
    x, y = _values(a), _values(b)
    count = min(len(x), len(y))  # it compares as many of each
    x, y = x[:count], y[:count]
    if count < 2:
        return False
    return bool(is_significant(list(x), list(y))[0]) and y.mean() / x.mean() - 1 > GUARD


def _values(calls: np.ndarray, value_s: float = _VALUE_S) -> np.ndarray:
    per_value = max(1, math.ceil(value_s / float(np.median(calls))))
    whole = len(calls) // per_value
    return calls[: whole * per_value].reshape(whole, per_value).mean(axis=1)


def torch_compare(a: np.ndarray, b: np.ndarray) -> bool:
    """torch.utils.benchmark: `Compare` prints medians in as many figures as it believes in; they differ or not."""
    task = torch.utils.benchmark.TaskSpec("call()", "pass")
    sides = [torch.utils.benchmark.Measurement(1, list(x), task) for x in (a, b)]
    shown = [
        torch.utils.benchmark.utils.common.trim_sigfig(m.median, m.significant_figures)
        for m in sides
    ]
    return shown[1] / shown[0] - 1 > GUARD


def hyperfine_ratio(a: np.ndarray, b: np.ndarray) -> bool:
    """hyperfine: "1.05 ± 0.02 times slower", the standard deviations propagated into the ratio's."""
    ratio = b.mean() / a.mean()
    spread = ratio * math.hypot(a.std(ddof=1) / a.mean(), b.std(ddof=1) / b.mean())
    return ratio - spread > 1 and ratio - 1 > GUARD


def asv_compare(a: np.ndarray, b: np.ndarray) -> bool:
    """asv: Mann and Whitney's U on the samples, p < .002, and the factor between medians."""
    return mannwhitneyu(a, b).pvalue < 0.002 and np.median(b) / np.median(a) - 1 > GUARD


def plain_means(a: np.ndarray, b: np.ndarray) -> bool:
    """Twenty trials each, mean ± sd: the bands do not touch."""
    x, y = a[:20], b[:20]
    return y.mean() - y.std(ddof=1) > x.mean() + x.std(ddof=1) and y.mean() / x.mean() - 1 > GUARD


def benchstat(a: np.ndarray, b: np.ndarray) -> bool:
    """Go's benchstat: Mann and Whitney's U at 5 % on results of a second each, and the medians' change."""
    x, y = (_values(side, 1.0) for side in (a, b))
    return (
        min(len(x), len(y)) >= 4
        and mannwhitneyu(x, y).pvalue < 0.05
        and np.median(y) / np.median(x) - 1 > GUARD
    )


def tritonbench_ab(a: np.ndarray, b: np.ndarray) -> bool:
    """An A/B of raw iterations: Welch's t at 5 %, and the bootstrapped interval of the medians' ratio leaves out 1."""
    if ttest_ind(a, b, equal_var=False).pvalue >= 0.05:
        return False
    rng = np.random.default_rng(0)
    ratios = [
        np.median(rng.choice(b, len(b))) / np.median(rng.choice(a, len(a))) for _ in range(200)
    ]
    return float(np.quantile(ratios, 0.025)) > 1 and float(np.median(b) / np.median(a)) - 1 > GUARD


RULES = {
    "Go's benchstat": benchstat,
    "tritonbench A/B": tritonbench_ab,
    "pyperf compare_to": pyperf_compare,
    "torch.utils.benchmark": torch_compare,
    "hyperfine's ratio": hyperfine_ratio,
    "asv's Mann-Whitney": asv_compare,
    "20 trials, mean ± sd": plain_means,
}
