"""How other harnesses decide whether B is slower than A, from calls of A first, then of B.

Each rule takes call times of A and B in the order taken, seconds, and returns their ratio, or 1
where it sees no difference. Where pyperf and torch have code that decides, it does.
"""

import math

import numpy as np
from pyperf._utils import is_significant
from scipy.stats import mannwhitneyu, ttest_ind
from torch.utils import benchmark
from torch.utils.benchmark.utils import common

GUARD = 0.03  # the smallest change that counts; the same for all, so that only the rules differ


def pyperf_compare(a, b):
    """`pyperf compare_to`: Student's t on values of 100 ms."""
    x, y = _values(a), _values(b)
    count = min(len(x), len(y))  # it compares as many of each
    x, y = x[:count], y[:count]
    differs = count >= 2 and is_significant(list(x), list(y))[0]
    return y.mean() / x.mean() if differs else 1.0


def _values(calls, value_s=0.1):
    per_value = max(1, math.ceil(value_s / float(np.median(calls))))
    whole = len(calls) // per_value
    return calls[: whole * per_value].reshape(whole, per_value).mean(axis=1)


def torch_compare(a, b):
    """torch.utils.benchmark: `Compare` rounds medians to figures it trusts; they differ or not."""
    task = benchmark.TaskSpec("call()", "pass")
    sides = [benchmark.Measurement(1, list(x), task) for x in (a, b)]
    shown = [common.trim_sigfig(side.median, side.significant_figures) for side in sides]
    return shown[1] / shown[0]


def hyperfine_ratio(a, b):
    """hyperfine: "1.05 ± 0.02 times slower", by propagation of the standard deviations."""
    ratio = b.mean() / a.mean()
    spread = ratio * math.hypot(a.std(ddof=1) / a.mean(), b.std(ddof=1) / b.mean())
    return ratio if ratio - spread > 1 else 1.0


def asv_compare(a, b):
    """asv: Mann and Whitney's U on the samples, p < .002, and the factor between medians."""
    return np.median(b) / np.median(a) if mannwhitneyu(a, b).pvalue < 0.002 else 1.0


def plain_means(a, b):
    """Twenty trials each, mean ± sd: the bands do not touch."""
    x, y = a[:20], b[:20]
    apart = y.mean() - y.std(ddof=1) > x.mean() + x.std(ddof=1)
    return y.mean() / x.mean() if apart else 1.0


def benchstat(a, b):
    """Go's benchstat: Mann and Whitney's U at 5 % on results of 1 s, and the medians' change."""
    x, y = (_values(side, 1.0) for side in (a, b))
    differs = min(len(x), len(y)) >= 4 and mannwhitneyu(x, y).pvalue < 0.05
    return np.median(y) / np.median(x) if differs else 1.0


def tritonbench_ab(a, b):
    """Raw iterations: Welch's t at 5 %, and the medians' ratio's bootstrapped interval omits 1."""
    if ttest_ind(a, b, equal_var=False).pvalue >= 0.05:
        return 1.0
    rng = np.random.default_rng(0)
    drawn = [np.median(rng.choice(side, (200, len(side))), axis=1) for side in (a, b)]
    apart = np.quantile(drawn[1] / drawn[0], 0.025) > 1
    return np.median(b) / np.median(a) if apart else 1.0


RULES = {
    "Go's benchstat": benchstat,
    "tritonbench A/B": tritonbench_ab,
    "pyperf compare_to": pyperf_compare,
    "torch.utils.benchmark": torch_compare,
    "hyperfine's ratio": hyperfine_ratio,
    "asv's Mann-Whitney": asv_compare,
    "20 trials, mean ± sd": plain_means,
}
