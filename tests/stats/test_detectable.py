"""The smallest change that a comparison states it would have found, against the power of its own test."""

import math
import os

import numpy as np
import pytest
from scipy.stats import nct, t, ttest_ind, wilcoxon
from statsmodels.stats.power import TTestPower

from nanolib.stats.compare import compare, compare_paired


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
@pytest.mark.parametrize("n", [8, 30])
def test_the_effect_that_is_stated_is_found_eighty_times_in_a_hundred(n):
    rng = np.random.default_rng(n)
    deltas = rng.normal(size=(int(os.environ.get("NANOLIB_SIMULATIONS", "800")), n))
    unit = (deltas[0] - deltas[0].mean()) / deltas[0].std(ddof=1)
    stated = math.log1p(compare_paired(np.ones(n), np.exp(0.01 * unit)).minimum_detectable_effect)
    found = np.mean([wilcoxon(0.01 * delta + stated).pvalue < 0.05 for delta in deltas])
    assert found == pytest.approx(0.8, abs=0.04)
