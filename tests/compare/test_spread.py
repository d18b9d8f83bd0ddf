"""Whether `nano compare` may be a gate: simulated evenings of one machine whose runs differ."""

import numpy as np
import pandas as pd
import pytest

from nanolib.compare.history import KEY, repeats, spread_between_runs
from nanolib.compare.runs import UNKNOWN, compare_rows
from nanolib.stats.compare import Kind, Spread, compare

CASES, BLOCKS, WITHIN = 10, 40, 0.01
GATES = 20
SHARED = {
    "experiment": "attention",
    "scope": "forward",
    "method": "perf_counter",
    "metric": "latency",
    "n": BLOCKS,
    "status": "ok",
    "machine_id": "m1",
    "fingerprint": "",
}


def _run(rng, run_id, between, revision="rev", slower=0.0):
    """Rows of a run. From run to run each case differs by `between`; the first one is `slower`."""
    rows = []
    for case in range(CASES):
        level = 10 * np.exp(rng.normal(0, between) if between else 0.0)
        blocks = level * np.exp(rng.normal(0, WITHIN, BLOCKS)) * (1 if case else 1 + slower)
        row = {"case_id": f"case{case}", "factors": {"name": f"case{case}"}, "samples": blocks}
        row |= {"run_id": run_id, "git_revision": revision, "estimate": float(np.median(blocks))}
        rows.append(SHARED | row | {"flags": [], "details": {}})
    return pd.DataFrame(rows)


def _gate(rng, between, earlier, slower=0.0):
    """A comparison of two runs, with so many earlier ones of the base's revision."""
    runs = [_run(rng, f"earlier{at}", between) for at in range(earlier)]
    base, current = _run(rng, "base", between), _run(rng, "current", between, "new", slower)
    return compare_rows(base, current, repeats=repeats([pd.concat([*runs, base, current])]))


MORE = [(0.03, 5), (0.0, 5), (0.01, 5), (0.05, 2)]
A_A = [(0.03, 2), (0.05, 5), *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE)]


@pytest.mark.slow
@pytest.mark.parametrize(("between", "earlier"), A_A)
def test_gates_of_identical_code_hardly_ever_fail_however_far_runs_lie_apart(between, earlier):
    rng = np.random.default_rng(int(1000 * between) + earlier)
    assert np.mean([_gate(rng, between, earlier).has_regressed for _ in range(GATES)]) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.01, pytest.param(0.0, marks=pytest.mark.thorough)])
def test_a_regression_that_is_large_beside_the_spread_fails_the_gate(between):
    rng = np.random.default_rng(7)
    found = [_gate(rng, between, earlier=5, slower=0.3) for _ in range(GATES)]
    assert np.mean([one.has_regressed and one.lines[0].case == "case0" for one in found]) >= 0.95


@pytest.mark.parametrize(("between", "earlier"), [(0.03, 0), (0.0, 1)])  # two with the base
def test_without_three_earlier_runs_of_one_revision_nothing_fails_and_the_line_says_what_decides(
    between, earlier
):
    found = _gate(np.random.default_rng(8), between, earlier, slower=0.3)
    line = next(line for line in found.lines if line.case == "case0")
    assert not found.has_regressed and line.finding == Kind.SUSPECT
    assert line.message == f"slower; {UNKNOWN}"


def _spread(run_id, **logs):
    """The spread that judges a run, from the logs of earlier runs by `revision@fingerprint`."""
    timing = dict.fromkeys(KEY, "x")
    rows = []
    for name, values in logs.items():
        revision, _, fingerprint = name.partition("@")
        for at, log in enumerate(values):
            row = {"run_id": f"{name}{at}", "estimate": float(np.exp(log))}
            rows.append(timing | row | {"git_revision": revision, "fingerprint": fingerprint})
    # two databases may hold the same runs
    return spread_between_runs(repeats([pd.DataFrame(rows)] * 2), timing | {"run_id": run_id})


def test_the_spread_is_pooled_over_committed_revisions_without_the_run_that_is_judged():
    logs = {"a": [0.0, 0.1, 0.2], "b": [1.0, 1.0, 1.2, 1.2], "c": [0.0, 5.0]}
    logs["d"] = [-np.inf] * 3  # times of 0 have no logarithm
    spread, without = _spread("z", **logs), _spread("a2", **logs)  # two are left of its revision
    assert (spread.sd, spread.freedom) == (pytest.approx(np.sqrt(0.06 / 5)), 5)
    assert (without.sd, without.freedom) == (pytest.approx(np.sqrt(0.04 / 3)), 3)
    assert all(_spread("z", **{name: [0.0, 0.1, 0.2]}) is None for name in ("", "a+"))


def test_runs_with_other_packages_or_functions_of_the_user_are_runs_of_another_version():
    assert _spread("z", **{"a@1": [0.0, 0.1], "a@2": [5.0, 5.1]}) is None
    spread = _spread("z", **{"a@1": [0.0, 0.1, 0.2], "a@2": [5.0, 5.1, 5.2]})
    assert (spread.sd, spread.freedom) == (pytest.approx(0.1), 4)


def test_a_spread_widens_the_interval_and_p_to_those_of_two_runs():
    a, b = 10 * np.exp(np.random.default_rng(3).normal(0, 0.01, (2, 40)))
    plain, wide = compare(a, 1.1 * b), compare(a, 1.1 * b, spread=Spread(0.03, 4))
    reach = 2.776445 * 0.03 * np.sqrt(2)  # Student's t.975 of four degrees of freedom
    low, ratio, high = wide.interval
    assert (np.log(high / ratio), np.log(ratio / low)) == pytest.approx((reach, reach))
    assert plain.kind is Kind.REGRESSED and wide.kind is Kind.INCONCLUSIVE
    assert wide.p > 0.05 > plain.p
    assert wide.minimum_detectable_effect > 4 * plain.minimum_detectable_effect
    narrow = compare(a, 1.1 * b, spread=Spread(1e-6, 4))
    assert narrow.interval == plain.interval  # never narrower than blocks say
