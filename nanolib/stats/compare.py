"""Compare two versions: how much slower or faster, with which confidence, and in one of five words."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import nctdtrinc, ndtri, stdtr, stdtrit

from nanolib.measurement import BadInput, Direction
from nanolib.stats.intervals import Interval, TooFewSamples
from nanolib.stats.signed_ranks import attained_level, capped_centre, capped_p, hodges_lehmann

THRESHOLD = 0.05  # a change below this is never called regressed or improved
MARGIN = 0.03  # suspect beyond it, equivalent within it
_ALPHA = 0.05


class Kind(enum.StrEnum):
    """The verdict of a comparison; exactly one holds."""

    REGRESSED = "regressed"
    IMPROVED = "improved"
    SUSPECT = "suspect"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Spread:
    """The spread between runs of the same code.

    Attributes:
        sd: Standard deviation from run to run, in logarithms.
        freedom: Its degrees of freedom.
    """

    sd: float
    freedom: int


@dataclass(frozen=True)
class Verdict:
    """One comparison of B with A.

    Attributes:
        kind: The verdict in one word.
        ratio: B / A, the estimate.
        interval: The ratio with its 95 % interval.
        p: Of "no difference", two-sided; adjusted if many were judged together.
        minimum_detectable_effect: The change, as a share, that is found 80 times in 100 with as many blocks.
        equivalence: The ratio with its 90 % interval, for two one-sided tests at 5 %.
        raw_p: p before any adjustment.
        threshold: The share from which a change counts.
        direction: Which way is better.
    """

    kind: Kind
    ratio: float
    interval: Interval
    p: float
    minimum_detectable_effect: float
    equivalence: Interval
    raw_p: float
    threshold: float = THRESHOLD
    direction: Direction = Direction.LOWER

    @property
    def worse(self) -> float:
        """The share by which B is worse than A; negative if it is better."""
        return self.ratio - 1 if self.direction is Direction.LOWER else 1 / self.ratio - 1

    @property
    def open(self) -> str:
        """What the kind does not say of a time: slower or faster, how far within the margin, or what was detectable."""
        way = "slower" if self.worse > 0 else "faster"
        by = f"{abs(self.ratio - 1):.1%} {way}"
        seen = not self.interval.low <= 1 <= self.interval.high
        if self.kind is Kind.SUSPECT:
            return way
        if self.kind is Kind.EQUIVALENT:
            return f"{by}, within the margin" if seen else ""
        if self.kind is not Kind.INCONCLUSIVE:
            return ""
        if seen:
            return f"{by}; whether it is more than {MARGIN:.0%} is not clear"
        return f"minimum detectable change: {self.minimum_detectable_effect:.1%}"


def compare_paired(
    base: ArrayLike,
    current: ArrayLike,
    *,
    threshold: float = THRESHOLD,
    direction: Direction = Direction.LOWER,
) -> Verdict:
    """Compare blocks that were measured in pairs, A and B one after the other in random order: drift affects both equally.

    Args:
        base: Block medians of A, shape [n], positive; n >= 6.
        current: Block medians of B, in the same order, any unit as long as it is the same.
        threshold: The share from which a change counts as regressed or improved.
        direction: Which way is better, `lower` or `higher`.

    Returns:
        The verdict; Hodges and Lehmann's estimate of ln(B/A) with its interval, p by Wilcoxon's signed-rank test.

    Raises:
        TooFewSamples: Fewer than six pairs.
        BadInput: Lengths that differ, or values that are not positive.
    """
    from scipy.stats import wilcoxon

    a, b = _logs(base, current)
    if len(a) != len(b):
        raise BadInput(
            f"current: {len(b)} blocks against {len(a)} of base; pairs need as many of each"
        )
    delta = b - a
    p = float(wilcoxon(delta).pvalue) if np.any(delta) else 1.0
    intervals = [hodges_lehmann(delta, confidence) for confidence in (0.95, 0.90)]
    # against normal differences the signed ranks are worth 3 / pi of a t-test's pairs
    error = float(delta.std(ddof=1)) / math.sqrt(len(delta)) * math.sqrt(math.pi / 3)
    effect = _detectable(error, len(delta) - 1, attained_level(len(delta), _ALPHA))
    return _verdict(intervals, p, effect, threshold, direction)


def paired_levels(base: ArrayLike, current: ArrayLike, ratio: float) -> tuple[float, float]:
    """Return levels of A and B to show with their ratio: their medians, moved so that B / A is that ratio.

    The ratio of pairs is not that of the two medians. A pair that is slow as a whole moves a median and not the ratio.

    Args:
        base: Block times of A, shape [n].
        current: Block times of B, shape [m], in the same unit.
        ratio: B / A, as estimated from pairs.

    Returns:
        Levels of A and of B, whose geometric mean is that of the two medians.
    """
    middle, half = np.sqrt(np.median(base) * np.median(current)), np.sqrt(ratio)
    return float(middle / half), float(middle * half)


def compare(
    base: ArrayLike,
    current: ArrayLike,
    *,
    threshold: float = THRESHOLD,
    direction: Direction = Direction.LOWER,
    spread: Spread | None = None,
) -> Verdict:
    """Compare blocks that were measured at different times: drift between them is not controlled.

    Args:
        base: Block medians of A, shape [n], positive; n >= 6.
        current: Block medians of B, shape [m], m >= 6.
        threshold: As in `compare_paired`.
        direction: As in `compare_paired`.
        spread: The spread between runs of the same code, which blocks of one run do not show. Without it, a difference of two
            runs may not be one of two versions.

    Returns:
        The verdict by Welch's test on logarithms. With a spread, also by a t-test on the two runs; p is the larger one, and the
        interval the wider.

    Raises:
        TooFewSamples: Fewer than six blocks of either.
        BadInput: Values that are not positive.
    """
    a, b = _logs(base, current)
    difference = float(b.mean() - a.mean())
    spreads = []  # standard error of the difference, degrees of freedom
    parts = [float(x.var(ddof=1)) / len(x) for x in (a, b)]
    if variance := sum(parts):
        shares = [part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True)]
        spreads.append((math.sqrt(variance), variance**2 / sum(shares)))
    if spread is not None and spread.sd:
        spreads.append((math.sqrt(2) * spread.sd, spread.freedom))
    if not spreads:  # nothing varies, because the clock is coarse
        same = Interval(difference, difference, difference)
        return _verdict([same, same], float(difference == 0), 0.0, threshold, direction)
    p = max(2 * float(stdtr(freedom, -abs(difference) / error)) for error, freedom in spreads)
    intervals = []
    for level in (0.95, 0.90):
        reach = max(float(stdtrit(freedom, (1 + level) / 2)) * error for error, freedom in spreads)
        intervals.append(Interval(difference - reach, difference, difference + reach))
    effect = max(_detectable(error, freedom) for error, freedom in spreads)
    return _verdict(intervals, p, effect, threshold, direction)


def compare_processes(
    ratios: ArrayLike, *, threshold: float = THRESHOLD, direction: Direction = Direction.LOWER
) -> Verdict:
    """Compare two versions by a ratio for each pair of processes, of which some are far off.

    The position of a process on the cores and in memory is an effect of its own. In most pairs it is one or two percent, but
    sometimes one of the two runs a quarter slower for all of its life. Which one is chance. So the center is found by a test that
    a symmetric share of such pairs does not move.

    Args:
        ratios: B / A for each pair of processes, shape [n], positive; n >= 6.
        threshold: As in `compare_paired`.
        direction: As in `compare_paired`.

    Returns:
        The verdict, with estimate, interval and p by signed ranks capped at a quarter, which never contradict each other.

    Raises:
        TooFewSamples: Fewer than six pairs.
        BadInput: Values that are not positive.
    """
    delta, _ = _logs(ratios, ratios)
    intervals = [capped_centre(delta, confidence) for confidence in (0.95, 0.90)]
    # a standard deviation would be widened by what lies far off
    error = (intervals[0].high - intervals[0].low) / 2 / float(ndtri(0.975))
    effect = _detectable(error, len(delta) - 1)
    return _verdict(intervals, capped_p(delta), effect, threshold, direction)


def judge_together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts with p adjusted for their number, which bounds the chance of any false alarm.

    Args:
        verdicts: Of all cases.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    p = np.array([verdict.raw_p for verdict in verdicts])
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1)
    pairs = zip(verdicts, adjusted.tolist(), strict=True)
    return [replace(verdict, p=p, kind=_kind(verdict, p)) for verdict, p in pairs]


def _logs(base: ArrayLike, current: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(base, dtype=float), np.asarray(current, dtype=float)
    for name, x in (("base", a), ("current", b)):
        if len(x) < 6:
            raise TooFewSamples(f"{name}: {len(x)} blocks are too few to compare; take at least 6")
        if not (np.isfinite(x) & (x > 0)).all():
            raise BadInput(f"{name}: must be greater than 0; give times, rates or sizes")
    return np.log(a), np.log(b)


def _detectable(error: float, freedom: float, alpha: float = _ALPHA) -> float:
    """Return the effect that a two-sided t-test at this level finds 80 times in 100, as a share, by the noncentral t."""
    return math.expm1(float(nctdtrinc(freedom, 0.2, stdtrit(freedom, 1 - alpha / 2))) * error)


def _verdict(
    logs: list[Interval], p: float, effect: float, threshold: float, direction: Direction
) -> Verdict:
    wide, narrow = (Interval(*(math.exp(end) for end in interval)) for interval in logs)
    rest = threshold, Direction(direction)
    verdict = Verdict(Kind.INCONCLUSIVE, wide.estimate, wide, p, effect, narrow, p, *rest)
    return replace(verdict, kind=_kind(verdict, p))


def _kind(verdict: Verdict, p: float) -> Kind:
    """Return the kind of a verdict whose adjusted p is `p`."""
    worse = verdict.worse
    better = 1 / (1 + worse) - 1  # the same in the other direction
    if p < _ALPHA and worse > verdict.threshold:
        return Kind.REGRESSED
    if p < _ALPHA and better > verdict.threshold:
        return Kind.IMPROVED
    if verdict.raw_p < _ALPHA and max(worse, better) > MARGIN:
        return Kind.SUSPECT
    if verdict.equivalence.low > 1 - MARGIN and verdict.equivalence.high < 1 + MARGIN:
        return Kind.EQUIVALENT
    return Kind.INCONCLUSIVE
