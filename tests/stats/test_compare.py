import functools
import math
import os
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import nct, t, ttest_ind, wilcoxon
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower

from nanolib.measurement import BadInput
from nanolib.paths import checkout
from nanolib.stats.compare import (
    Kind,
    Verdict,
    _kind,
    compare,
    compare_paired,
    compare_processes,
    judge_together,
)
from nanolib.stats.intervals import Interval, TooFewSamples
from nanolib.stats.signed_ranks import hodges_lehmann

# `make bench` draws ten times as many (tests/benchmarks/simulations.py) and holds closer bounds.
RUNS = int(os.environ.get("NANOLIB_SIMULATIONS", "200"))
MANY = RUNS >= 2000
PAIRS, CV = 30, 0.02


def _interleaved(rng, shape, effect=0.0, pairs=PAIRS):
    """Block times of A and B measured back to back in random order, over a machine that behaves as `shape` says."""
    slots = 2 * pairs
    drift = {
        "iid": np.zeros(slots),
        "drift": np.linspace(0, 0.05, slots),
        "random_walk": np.cumsum(rng.normal(0, 0.004, slots)),
        "process": np.repeat(rng.normal(0, 0.02, slots // 10), 10),
    }[shape]
    times = np.exp(drift + CV * rng.normal(size=slots)).reshape(pairs, 2)
    order = rng.permuted(np.tile([0, 1], (pairs, 1)), axis=1)
    a = np.take_along_axis(times, order[:, :1], axis=1)[:, 0]
    b = np.take_along_axis(times, order[:, 1:], axis=1)[:, 0]
    return a, b * (1 + effect)


@functools.cache
def _equal_versions(shape):
    """Rounds of a version against itself and what is said of each; two rounds per run."""
    rng = np.random.default_rng(1)
    rounds = [_interleaved(rng, shape) for _ in range(2 * RUNS)]
    return rounds, [compare_paired(*series) for series in rounds]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["iid", "drift", "random_walk", "process"])
def test_interleaved_false_alarms_are_five_in_a_hundred(shape):
    _, verdicts = _equal_versions(shape)
    slack = 0.015 if MANY else 0.025
    assert abs(np.mean([v.p < 0.05 for v in verdicts]) - 0.05) <= slack
    called = np.mean([v.kind in (Kind.REGRESSED, Kind.SUSPECT, Kind.IMPROVED) for v in verdicts])
    assert called <= 0.02


@pytest.mark.slow
def test_a_gate_of_a_hundred_equal_cases_hardly_ever_fails():
    rng, (_, pool) = np.random.default_rng(2), _equal_versions("process")
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
    found = 0
    for _ in range(RUNS):
        delta = rng.normal(math.log1p(effect), sd, pairs)
        found += compare_paired(np.ones(pairs), np.exp(delta)).p < 0.05
    expected = TTestPower().power(math.log1p(effect) / sd, pairs, 0.05)
    assert found / RUNS == pytest.approx(expected, abs=0.03 if MANY else 0.06)


def test_p_is_wilcoxons_and_welchs():
    rng = np.random.default_rng(6)
    a, b = rng.lognormal(0, 0.1, 30), rng.lognormal(0.02, 0.2, 40)
    assert compare_paired(a, b[:30]).p == wilcoxon(np.log(b[:30] / a)).pvalue
    reference = ttest_ind(np.log(b), np.log(a), equal_var=False)
    interval = reference.confidence_interval()
    verdict = compare(a, b)
    assert verdict.p == pytest.approx(reference.pvalue)
    narrow = reference.confidence_interval(0.90)
    for ours, theirs in ((verdict.interval, interval), (verdict.equivalence, narrow)):
        assert (ours.low, ours.high) == pytest.approx(np.exp(list(theirs)))


def test_on_a_coarse_clock_where_nothing_varies_two_levels_differ():
    slower, same = compare([1.0] * 8, [2.0] * 8), compare([1.0] * 8, [1.0] * 8)
    assert (slower.kind, slower.p, slower.ratio) == (Kind.REGRESSED, 0.0, pytest.approx(2))
    assert tuple(slower.interval) == tuple(slower.equivalence) == pytest.approx((2, 2, 2))
    assert (same.kind, same.p, same.ratio) == (Kind.EQUIVALENT, 1.0, 1.0)
    assert same.minimum_detectable_effect == 0.0


@pytest.mark.parametrize("n", [20, 61])  # exact, and normal
def test_the_interval_of_the_center_is_what_wilcoxons_test_does_not_reject(n):
    x = np.random.default_rng(n).normal(0.1, 1, n)
    for confidence in (0.90, 0.95):
        low, _, high = hodges_lehmann(x, confidence)

        for end, side in ((low, 1e-9), (high, -1e-9)):
            accepted, rejected = (wilcoxon(x - one).pvalue for one in (end + side, end - side))
            assert rejected - 0.003 <= 1 - confidence < accepted + 0.003


def _verdict(low, ratio, high, p, effect=0.05):
    interval = Interval(low, ratio, high)
    return Verdict(Kind.INCONCLUSIVE, ratio, interval, p, effect, interval, p)


@pytest.mark.parametrize(
    ("ratio", "p", "raw_p", "kind"),
    [
        (1.06, 0.049, 0.049, Kind.REGRESSED),
        (1.06, 0.050, 0.049, Kind.SUSPECT),
        (1.0499, 0.010, 0.010, Kind.SUSPECT),
        (1.06, 0.050, 0.050, Kind.INCONCLUSIVE),
        (1.0301, 0.010, 0.010, Kind.SUSPECT),
        (1.0299, 0.010, 0.010, Kind.INCONCLUSIVE),
        (0.94, 0.049, 0.049, Kind.IMPROVED),
        (0.94, 0.050, 0.049, Kind.SUSPECT),
        (0.96, 0.010, 0.010, Kind.SUSPECT),
        (0.97, 0.010, 0.010, Kind.SUSPECT),
        (0.971, 0.010, 0.010, Kind.INCONCLUSIVE),
    ],
)
def test_the_kind_changes_at_its_bounds(ratio, p, raw_p, kind):
    assert _kind(_verdict(0.9 * ratio, ratio, 1.1 * ratio, raw_p), p) is kind


@pytest.mark.parametrize("ends", [(0.971, 1.029), (0.970, 1.029), (0.971, 1.030)])
def test_what_is_equivalent_lies_within_the_margin(ends):
    low, high = ends
    is_within = ends == (0.971, 1.029)
    assert (_kind(_verdict(low, 1.0, high, 0.5), 0.5) is Kind.EQUIVALENT) == is_within


def test_many_are_adjusted_as_statsmodels_does():
    rng = np.random.default_rng(7)
    verdicts = [
        compare_paired(*_interleaved(rng, "iid", effect=e)) for e in (0, 0, 0.01, 0.02, 0.2)
    ]
    expected = multipletests([v.p for v in verdicts], method="holm")[1]
    assert [v.p for v in judge_together(verdicts)] == pytest.approx(list(expected))
    assert judge_together([]) == []


@pytest.mark.parametrize("compared", [compare, compare_paired])
def test_higher_is_better_turns_the_words_round(compared):
    a, b = _interleaved(np.random.default_rng(11), "iid", 0.2)
    assert compared(a, b, direction="higher").kind is Kind.IMPROVED
    assert compared(b, a, direction="higher").kind is Kind.REGRESSED


@pytest.mark.parametrize("compared", [compare, compare_paired])
def test_what_cannot_be_compared_is_refused(compared):
    with pytest.raises(TooFewSamples, match="base: 5 blocks are too few"):
        compared([1] * 5, [1] * 6)
    with pytest.raises(BadInput, match="current: each value must be greater than 0"):
        compared([1] * 6, [0] * 6)
    with pytest.raises(BadInput, match="7 blocks, but base has 6"):
        compare_paired([1] * 6, [1] * 7)


# Pairs of processes: most ratios are near the truth. A share of them is far off on either side, because either process was slow.
SPREADS = [(0.01, 0.0), (0.015, 0.33), (0.015, 0.1), (0.03, 0.2)]
SLOWER = 0.10, 0.40


def _processes(rng, effect, spread, share, pairs=45):
    delta = rng.normal(math.log1p(effect), spread, pairs)
    far = rng.random(pairs) < share
    off = rng.choice([-1, 1], pairs) * np.log1p(rng.uniform(*SLOWER, pairs))
    return np.exp(delta + far * off)


CALLED = (Kind.REGRESSED, Kind.SUSPECT, Kind.IMPROVED)


def test_the_text_states_the_effects_of_a_process_that_the_simulations_cover():
    method = (checkout() / "docs" / "method.md").read_text(encoding="utf-8")
    spreads = [spread for spread, _ in SPREADS]
    usual, far = (f"{100 * min(ends):g} to {100 * max(ends):g} %" for ends in (spreads, SLOWER))
    for text in (method, compare_processes.__doc__):
        words = " ".join(text.split())
        assert f"by {usual}" in words and f"{far} slower" in words


@pytest.mark.slow
@pytest.mark.parametrize(("spread", "share"), SPREADS if MANY else SPREADS[:2])
def test_of_processes_that_are_now_and_then_slow_equal_versions_are_not_called_and_true_changes_are(
    spread, share
):
    rng = np.random.default_rng(21)
    for effect, least, most in ((0.0, 0, 0.01), (0.05, 0.98, 1), (-0.05, 0.98, 1)):
        found = [compare_processes(_processes(rng, effect, spread, share)) for _ in range(RUNS)]
        assert least <= np.mean([v.kind in CALLED for v in found]) <= most, effect
        coverage = np.mean([v.interval.low <= 1 + effect <= v.interval.high for v in found])
        assert (0.93 if MANY else 0.91) <= coverage <= (0.98 if MANY else 0.99), effect
        assert all((v.p < 0.05) == (not v.interval.low <= 1 <= v.interval.high) for v in found)
    found = [
        compare_processes(_processes(rng, 0.05, spread, share), threshold=0.025)
        for _ in range(RUNS)
    ]
    assert np.mean([v.kind is Kind.REGRESSED for v in found]) >= 0.95


@pytest.mark.slow
def test_wilcoxons_own_test_fails_where_a_third_of_the_processes_is_far_off():
    """The negative control: just those get the largest ranks."""
    rng = np.random.default_rng(22)
    ratios = [_processes(rng, 0.05, 0.015, 0.33) for _ in range(RUNS)]
    assert np.mean([compare_paired(np.ones(45), one).p < 0.05 for one in ratios]) < 0.9


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


def test_the_effect_that_could_be_seen_is_that_of_the_t_test():
    rng = np.random.default_rng(13)
    a, b = rng.lognormal(0, 0.1, 12), rng.lognormal(0, 0.2, 20)
    level = 2 * 87 / 2**12  # of 4,096 signs 87 give a sum of at most 13, the last that counts
    deviation = np.log(b[:12] / a).std(ddof=1) * math.sqrt(math.pi / 3)
    reach = TTestPower().solve_power(nobs=12, alpha=level, power=0.8) * deviation
    found = compare_paired(a, b[:12]).minimum_detectable_effect
    assert found == pytest.approx(math.expm1(reach), rel=1e-4)
    welch = ttest_ind(np.log(b), np.log(a), equal_var=False)
    error = math.sqrt(np.log(a).var(ddof=1) / 12 + np.log(b).var(ddof=1) / 20)
    noncentrality = math.log1p(compare(a, b).minimum_detectable_effect) / error
    assert nct.sf(t.ppf(0.975, welch.df), welch.df, noncentrality) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("n", [8, pytest.param(30, marks=pytest.mark.thorough)])
def test_the_effect_that_is_stated_is_found_eighty_times_in_a_hundred(n):
    rng = np.random.default_rng(n)
    deltas = rng.normal(size=(int(os.environ.get("NANOLIB_SIMULATIONS", "800")), n))
    unit = (deltas[0] - deltas[0].mean()) / deltas[0].std(ddof=1)
    stated = math.log1p(compare_paired(np.ones(n), np.exp(0.01 * unit)).minimum_detectable_effect)
    found = np.mean([wilcoxon(0.01 * delta + stated).pvalue < 0.05 for delta in deltas])
    assert found == pytest.approx(0.8, abs=0.04)
