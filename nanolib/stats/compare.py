"""Compare the times of two versions: the ratio with its interval, and a verdict in one word."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr, stdtrit

from nanolib.measurement import BadInput
from nanolib.stats.intervals import Interval, TooFewSamples, hodges_lehmann, median_interval

THRESHOLD = 0.05  # Smallest change that counts as regressed or improved.
# Two versions are equivalent if the 90 % interval of their ratio is between 0.97 and 1.03.
MARGIN = 0.03
_ALPHA = 0.05


class Kind(enum.StrEnum):
    """Verdict of a comparison."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    SUSPECT = "suspect"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Spread:
    """Spread between runs of the same code.

    Attributes:
        sd: Standard deviation between runs, of the logarithm of a timing.
        freedom: Degrees of freedom of the standard deviation.
    """

    sd: float
    freedom: int


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of version B with version A.

    Attributes:
        kind: Verdict in one word.
        ratio: Estimate of B / A.
        interval: The ratio with its 95 % interval.
        p: Two-sided p-value of the comparison, adjusted for the number of comparisons.
        minimum_detectable_effect: Smallest change that the test finds in 80 % of runs, as a share.
        equivalence: The ratio with its 90 % interval, for two one-sided equivalence tests at 5 %.
        raw_p: Two-sided p-value of the comparison, before any adjustment.
        threshold: Smallest change that counts, as a share.
    """

    kind: Kind
    ratio: float
    interval: Interval
    p: float
    minimum_detectable_effect: float
    equivalence: Interval
    raw_p: float
    threshold: float = THRESHOLD

    @property
    def open(self) -> str:
        """Text that completes a verdict with the direction, the size or the detectable change."""
        way = "slower" if self.ratio > 1 else "faster"
        by = f"{abs(self.ratio - 1):.1%} {way}"
        seen = not self.interval.low <= 1 <= self.interval.high
        if self.kind is Kind.SUSPECT:
            return way
        if self.kind is Kind.EQUIVALENT:
            return f"{by}, within the margin" if seen else ""
        if self.kind is not Kind.INCONCLUSIVE:
            return ""
        if seen:
            return f"{by}; it is unclear whether the change exceeds {MARGIN:.0%}"
        return f"minimum detectable change: {self.minimum_detectable_effect:.1%}"


def compare_paired(base: ArrayLike, current: ArrayLike, *, threshold: float = THRESHOLD) -> Verdict:
    """Compare blocks of A and B that were measured in pairs, so that drift affects both equally.

    The ratio is Hodges and Lehmann's estimate. The p-value is from Wilcoxon's test on ln(B/A).

    Args:
        base: Block medians of A, any unit, shape [n], above 0, n >= 6.
        current: Block medians of B in the same order and unit, shape [n], above 0.
        threshold: Smallest change that counts as regressed or improved, as a share.

    Raises:
        TooFewSamples: There are fewer than six pairs.
        BadInput: The lengths differ, or a value is not above 0.
    """
    from scipy.stats import sem, wilcoxon

    a, b = _logs("base", base), _logs("current", current)
    if len(a) != len(b):
        raise BadInput(
            f"current: {len(b)} blocks, but base has {len(a)} blocks; give equal numbers of blocks"
        )
    delta = b - a
    p = float(wilcoxon(delta).pvalue) if np.any(delta) else 1.0
    intervals = [hodges_lehmann(delta, confidence) for confidence in (0.95, 0.90)]
    effect = _detectable(float(sem(delta)), len(delta) - 1)
    return _verdict(intervals, p, effect, threshold)


def compare(
    base: ArrayLike,
    current: ArrayLike,
    *,
    threshold: float = THRESHOLD,
    spread: Spread | None = None,
) -> Verdict:
    """Compare blocks of A and B that were measured at different times, without control of drift.

    The verdict is from Welch's test on logarithms. If you give `spread`, nanolib also compares the
    two runs with a t-test. The larger p-value and the wider interval count.

    Args:
        base: Block medians of A, any unit, shape [n], above 0, n >= 6.
        current: Block medians of B in the same unit, shape [m], above 0, m >= 6.
        threshold: Smallest change that counts as regressed or improved, as a share.
        spread: Spread between runs of the same code, which the blocks of one run do not show.

    Raises:
        TooFewSamples: A or B has fewer than six blocks.
        BadInput: A value is not above 0.
    """
    a, b = _logs("base", base), _logs("current", current)
    difference = float(b.mean() - a.mean())
    # Each item is the standard error of the difference and the degrees of freedom of one test.
    tests = []
    parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
    if variance := sum(parts):
        shares = [part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True)]
        tests.append((math.sqrt(variance), variance**2 / sum(shares)))
    if spread and spread.sd:
        tests.append((math.sqrt(2) * spread.sd, spread.freedom))
    if not tests:  # On a coarse clock, all blocks may take the same time.
        same = Interval(difference, difference, difference)
        return _verdict([same, same], float(difference == 0), 0.0, threshold)
    p = max(2 * float(stdtr(freedom, -abs(difference) / error)) for error, freedom in tests)
    intervals = []
    for level in (0.95, 0.90):
        reach = max(float(stdtrit(freedom, (1 + level) / 2)) * error for error, freedom in tests)
        intervals.append(Interval(difference - reach, difference, difference + reach))
    effect = max(_detectable(*test) for test in tests)
    return _verdict(intervals, p, effect, threshold)


def compare_processes(ratios: ArrayLike, *, threshold: float = THRESHOLD) -> Verdict:
    """Compare two versions by their ratio in each pair of processes.

    The memory layout and the cores of a process change its speed by chance, in most pairs by 1 to
    3 %. Some processes are 10 to 40 % slower until they end. Such outliers hardly change the median
    of the ratios, so the ratio is the median, and the p-value is from the sign test.

    Args:
        ratios: B / A for each pair of processes, shape [n], above 0, n >= 6.
        threshold: Smallest change that counts as regressed or improved, as a share.

    Raises:
        TooFewSamples: There are fewer than six pairs.
        BadInput: A ratio is not above 0.

    Source: Conover (1999), Practical nonparametric statistics, section 3.4, for the sign test.
    """
    from scipy.stats import binomtest

    delta = _logs("ratios", ratios)
    intervals = [median_interval(delta, confidence) for confidence in (0.95, 0.90)]
    moved = np.count_nonzero(delta)
    p = float(binomtest(np.count_nonzero(delta > 0), moved).pvalue) if moved else 1.0
    # Outliers increase a standard deviation, so nanolib derives the error from the interval.
    error = (intervals[0].high - intervals[0].low) / 2 / 1.96
    return _verdict(intervals, p, _detectable(error, len(delta) - 1), threshold)


def judge_together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Adjust p-values for the number of comparisons, and return the verdicts with the new p-values.

    Args:
        verdicts: Verdicts of all cases.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    p = np.array([verdict.raw_p for verdict in verdicts])
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    pairs = zip(verdicts, adjusted.tolist(), strict=True)
    return [replace(verdict, p=p, kind=_kind(verdict, p)) for verdict, p in pairs]


def _logs(name: str, values: ArrayLike) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1:
        raise BadInput(f"{name}: shape {list(x.shape)} is not one list; give a value per block")
    if len(x) < 6:
        raise TooFewSamples(f"{name}: {len(x)} blocks are too few to compare; take at least 6")
    if not (np.isfinite(x) & (x > 0)).all():
        raise BadInput(f"{name}: each value must be greater than 0; give times, rates or sizes")
    return np.log(x)


def _detectable(error: float, freedom: float) -> float:
    """Return the smallest change that a two-sided t-test finds in 80 % of runs, as a share."""
    return math.expm1(float(stdtrit(freedom, 1 - _ALPHA / 2) + stdtrit(freedom, 0.8)) * error)


def _verdict(logs: list[Interval], p: float, effect: float, threshold: float) -> Verdict:
    wide, narrow = (Interval(*(math.exp(end) for end in interval)) for interval in logs)
    if not 0 <= threshold < 1:
        raise BadInput(f"threshold: must be a share from 0 to below 1, got {threshold!r}")
    verdict = Verdict(Kind.INCONCLUSIVE, wide.estimate, wide, p, effect, narrow, p, threshold)
    return replace(verdict, kind=_kind(verdict, p))


def _kind(verdict: Verdict, p: float) -> Kind:
    """Return the verdict in one word, from the adjusted p-value `p`."""
    slower, faster = verdict.ratio - 1, 1 / verdict.ratio - 1
    if p < _ALPHA and slower > verdict.threshold:
        return Kind.REGRESSED
    if p < _ALPHA and faster > verdict.threshold:
        return Kind.IMPROVED
    if verdict.raw_p < _ALPHA and max(slower, faster) > MARGIN:
        return Kind.SUSPECT
    if verdict.equivalence.low > 1 - MARGIN and verdict.equivalence.high < 1 + MARGIN:
        return Kind.EQUIVALENT
    return Kind.INCONCLUSIVE
