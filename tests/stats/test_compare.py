"""Verdicts on two versions: false alarms, power, bounds; agreement with scipy and statsmodels."""

import functools
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, t, ttest_ind, wilcoxon
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from nanolib.measurement import BadInput
from nanolib.stats.compare import (
    Kind,
    Verdict,
    _kind,
    compare,
    compare_paired,
    compare_processes,
    judge_together,
)
from nanolib.stats.intervals import Interval, TooFewSamples, hodges_lehmann, median_interval

# `make bench` draws ten times as many (tests/benchmarks/simulations.py) and has closer bounds.
RUNS = int(os.environ.get("NANOLIB_SIMULATIONS", "200"))
MANY = RUNS >= 2000
PAIRS, CV = 30, 0.02
CALLED = (Kind.REGRESSED, Kind.SUSPECT, Kind.IMPROVED)


def _interleaved(rng, shape, effect=0.0, pairs=PAIRS):
    """Block times of A and B measured back to back in random order, while the machine drifts."""
    slots = 2 * pairs
    drift = {
        "iid": np.zeros(slots),
        "drift": np.linspace(0, 0.05, slots),
        "random_walk": np.cumsum(rng.normal(0, 0.004, slots)),
        "process": np.repeat(rng.normal(0, 0.02, slots // 10), 10),
    }[shape]
    times = np.exp(drift + CV * rng.normal(size=slots)).reshape(pairs, 2)
    a, b = rng.permuted(times, axis=1).T
    return a, b * (1 + effect)


@functools.cache
def _equal_versions(shape):
    """Verdicts on a version against itself, two per run."""
    rng = np.random.default_rng(1)
    return [compare_paired(*_interleaved(rng, shape)) for _ in range(2 * RUNS)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["iid", "drift", "random_walk", "process"])
def test_interleaved_false_alarms_are_five_in_a_hundred(shape):
    verdicts = _equal_versions(shape)
    slack = 0.015 if MANY else 0.025
    assert abs(np.mean([v.p < 0.05 for v in verdicts]) - 0.05) <= slack
    assert np.mean([v.kind in CALLED for v in verdicts]) <= 0.02


@pytest.mark.slow
def test_a_gate_of_a_hundred_equal_cases_hardly_ever_fails():
    rng, pool = np.random.default_rng(2), _equal_versions("process")
    gates = [
        judge_together([pool[i] for i in rng.integers(len(pool), size=100)])
        for _ in range(60 if MANY else 15)
    ]
    assert np.mean([any(v.kind is Kind.REGRESSED for v in gate) for gate in gates]) <= 0.015


def test_sequential_collection_under_drift_raises_false_alarms():
    """The negative control: the same machine, A first and then B."""
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(RUNS):
        times = np.exp(np.linspace(0, 0.05, 2 * PAIRS) + CV * rng.normal(size=2 * PAIRS))
        alarms += compare(times[:PAIRS], times[PAIRS:]).p < 0.05
    assert alarms / RUNS > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("effect", [0.03, 0.075] + [0.05, 0.10] * MANY)
def test_power_is_that_of_the_t_test_on_gaussian_differences(effect):
    rng, sd, pairs = np.random.default_rng(4), 0.09, 25
    delta = rng.normal(math.log1p(effect), sd, (RUNS, pairs))
    found = np.mean([compare_paired(np.ones(pairs), np.exp(one)).p < 0.05 for one in delta])
    expected = TTestPower().power(math.log1p(effect) / sd, pairs, 0.05)
    assert found == pytest.approx(expected, abs=0.03 if MANY else 0.06)


def test_p_intervals_and_detectable_changes_are_those_of_wilcoxons_and_welchs_tests():
    rng = np.random.default_rng(13)
    a, b = rng.lognormal(0, 0.1, 12), rng.lognormal(0, 0.2, 20)
    paired, delta = compare_paired(a, b[:12]), np.log(b[:12] / a)
    assert paired.p == wilcoxon(delta).pvalue
    reach = (t.ppf(0.975, 11) + t.ppf(0.8, 11)) * delta.std(ddof=1) / math.sqrt(12)
    assert paired.minimum_detectable_effect == pytest.approx(math.expm1(reach))
    apart, welch = compare(a, b), ttest_ind(np.log(b), np.log(a), equal_var=False)
    assert apart.p == pytest.approx(welch.pvalue)
    for ours, confidence in ((apart.interval, 0.95), (apart.equivalence, 0.90)):
        theirs = welch.confidence_interval(confidence)
        assert (ours.low, ours.high) == pytest.approx(np.exp(list(theirs)))
    error = np.log(apart.ratio) / welch.statistic
    errors = math.log1p(apart.minimum_detectable_effect) / error
    assert errors == pytest.approx(t.ppf(0.975, welch.df) + t.ppf(0.8, welch.df))


def test_on_a_coarse_clock_where_nothing_varies_two_levels_differ():
    slower, same = compare([1.0] * 8, [2.0] * 8), compare([1.0] * 8, [1.0] * 8)
    assert (slower.kind, slower.p) == (Kind.REGRESSED, 0.0)
    assert tuple(slower.interval) == tuple(slower.equivalence) == pytest.approx((2, 2, 2))
    assert (same.kind, same.p, same.ratio) == (Kind.EQUIVALENT, 1.0, 1.0)
    assert same.minimum_detectable_effect == 0.0


def test_the_interval_of_the_center_is_what_wilcoxons_test_does_not_reject():
    """Of more than 60 values, whose distribution is taken for normal."""
    x = np.random.default_rng(61).normal(0.1, 1, 61)
    low, _, high = hodges_lehmann(x, 0.90)
    for end, side in ((low, 1e-9), (high, -1e-9)):
        accepted, rejected = (wilcoxon(x - one).pvalue for one in (end + side, end - side))
        assert rejected - 0.003 <= 0.10 < accepted + 0.003


def _verdict(low, ratio, high, p, effect=0.05):
    interval = Interval(low, ratio, high)
    return Verdict(Kind.INCONCLUSIVE, ratio, interval, p, effect, interval, p)


@pytest.mark.parametrize(
    ("ends", "p", "raw_p", "kind"),
    [
        ((0.95, 1.06, 1.2), 0.049, 0.049, Kind.REGRESSED),
        ((0.95, 1.06, 1.2), 0.050, 0.049, Kind.SUSPECT),
        ((0.95, 1.0499, 1.2), 0.010, 0.010, Kind.SUSPECT),
        ((0.95, 1.06, 1.2), 0.050, 0.050, Kind.INCONCLUSIVE),
        ((0.95, 1.0301, 1.2), 0.010, 0.010, Kind.SUSPECT),
        ((0.95, 1.0299, 1.2), 0.010, 0.010, Kind.INCONCLUSIVE),
        ((0.85, 0.94, 1.04), 0.049, 0.049, Kind.IMPROVED),
        ((0.85, 0.94, 1.04), 0.050, 0.049, Kind.SUSPECT),
        ((0.85, 0.97, 1.04), 0.010, 0.010, Kind.SUSPECT),
        ((0.85, 0.971, 1.04), 0.010, 0.010, Kind.INCONCLUSIVE),
        ((0.971, 1.0, 1.029), 0.5, 0.5, Kind.EQUIVALENT),
        ((0.970, 1.0, 1.029), 0.5, 0.5, Kind.INCONCLUSIVE),
        ((0.971, 1.0, 1.030), 0.5, 0.5, Kind.INCONCLUSIVE),
    ],
)
def test_the_kind_changes_at_its_bounds(ends, p, raw_p, kind):
    assert _kind(_verdict(*ends, raw_p), p) is kind


def test_many_are_adjusted_as_statsmodels_does():
    rng = np.random.default_rng(7)
    effects = 0, 0, 0.01, 0.02, 0.2
    verdicts = [compare_paired(*_interleaved(rng, "iid", effect)) for effect in effects]
    expected = multipletests([v.p for v in verdicts], method="holm")[1]
    assert [v.p for v in judge_together(verdicts)] == pytest.approx(list(expected))


@pytest.mark.parametrize("compared", [compare, compare_paired])
def test_a_slower_version_regressed_and_invalid_blocks_are_refused(compared):
    a, b = _interleaved(np.random.default_rng(11), "iid", 0.2)
    assert (compared(a, b).kind, compared(b, a).kind) == (Kind.REGRESSED, Kind.IMPROVED)
    with pytest.raises(TooFewSamples, match="base: 5 blocks are too few"):
        compared([1] * 5, [1] * 6)
    with pytest.raises(BadInput, match="current: each value must be greater than 0"):
        compared([1] * 6, [0] * 6)
    with pytest.raises(BadInput, match="7 blocks, but base has 6"):
        compare_paired([1] * 6, [1] * 7)
    with pytest.raises(BadInput, match=r"base: shape \[6, 2\] is not one list"):
        compared([[1, 2]] * 6, [1] * 6)
    for threshold in (1.0, math.nan):
        with pytest.raises(BadInput, match="threshold: must be"):
            compared(a, b, threshold=threshold)


def _processes(rng, effect, spread, share, pairs=45):
    """Ratios of pairs of processes, a share of which is 10 to 40 % off on either side."""
    delta = rng.normal(math.log1p(effect), spread, pairs)
    far = rng.random(pairs) < share
    off = rng.choice([-1, 1], pairs) * np.log1p(rng.uniform(0.10, 0.40, pairs))
    return np.exp(delta + far * off)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "share"), [(0.01, 0.0), (0.015, 0.33)] + [(0.015, 0.1), (0.03, 0.2)] * MANY
)
def test_slow_processes_neither_raise_false_alarms_nor_hide_true_changes(spread, share):
    rng = np.random.default_rng(21)

    def judged(effect, **how):
        ratios = (_processes(rng, effect, spread, share) for _ in range(RUNS))
        return [compare_processes(one, **how) for one in ratios]

    for effect, least, most in ((0.0, 0, 0.01), (0.05, 0.98, 1), (-0.05, 0.98, 1)):
        found = judged(effect)
        assert least <= np.mean([v.kind in CALLED for v in found]) <= most, effect
        coverage = np.mean([v.interval.low <= 1 + effect <= v.interval.high for v in found])
        assert (0.93 if MANY else 0.91) <= coverage <= (0.98 if MANY else 0.99), effect
    called = [v.kind is Kind.REGRESSED for v in judged(0.05, threshold=0.025)]
    assert np.mean(called) >= 0.95


def test_pairs_of_processes_are_judged_by_their_median_and_the_sign_test():
    ratios = np.random.default_rng(9).lognormal(0.01, 0.05, 9)
    found = compare_processes([*ratios, 1.0])  # what did not move has no sign
    assert found.p == pytest.approx(binomtest(int((ratios > 1).sum()), 9).pvalue)
    assert tuple(found.interval) == pytest.approx(np.exp(median_interval(np.log([*ratios, 1.0]))))
    assert compare_processes([1.0] * 9).p == 1.0
    # The median of normal values varies √(π/2) times as much as their mean.
    many = np.random.default_rng(9).lognormal(0.0, 0.02, (50, 100))
    pairs = [(compare_processes(one), compare_paired(np.ones(100), one)) for one in many]
    effects = [[verdict.minimum_detectable_effect for verdict in pair] for pair in pairs]
    by_median, by_mean = np.mean(effects, axis=0)
    assert by_median == pytest.approx(np.sqrt(np.pi / 2) * by_mean, rel=0.1)
    with pytest.raises(TooFewSamples, match="5 blocks are too few"):
        compare_processes([1.0] * 5)


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ((1.016, 1.024, 1.029), "2.4% slower, within the margin"),
        ((0.99, 1.0, 1.01), ""),
        ((1.05, 1.10, 1.15), ""),
        ((1.01, 1.04, 1.07), "slower"),
        ((0.93, 0.96, 0.99), "faster"),
        ((1.01, 1.02, 1.05), "2.0% slower; it is unclear whether the change exceeds 3%"),
        ((0.95, 1.02, 1.08), "minimum detectable change: 2.0%"),
    ],
)
def test_what_the_word_leaves_open_is_said_with_its_side(ends, text):
    p = 0.5 if ends[0] <= 1 <= ends[2] else 0.01
    verdict = _verdict(*ends, p, effect=0.02)
    assert replace(verdict, kind=_kind(verdict, p)).open == text
