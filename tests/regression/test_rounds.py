import numpy as np
import pytest

from nanolib.regression.rounds import Pairs, block_calls
from nanolib.stats.compare import compare_paired


def _series(generations, ratio):
    a = np.random.default_rng(0).lognormal(0, 0.1, 5 * generations)
    shift = np.repeat(ratio, 5)
    return Pairs(a.tolist(), (a * shift).tolist(), [5] * generations)


def test_a_pair_of_processes_is_the_datum_where_there_are_enough():
    ratios = [1.0, 1.1, 0.9, 1.2, 1.05, 1.15]
    a, b = _series(6, ratios).data()
    assert list(a) == [1] * 6 and list(b) == pytest.approx(ratios)
    a, b = _series(5, ratios[:5]).data()
    assert len(a) == len(b) == 25
    both = _series(3, ratios[:3]) + _series(3, ratios[3:])
    assert both.generations == [5] * 6 and list(both.data()[1]) == pytest.approx(ratios)
    assert str(both) == "30 pairs in 6 pairs of processes"


def test_processes_that_differ_by_chance_are_no_regression():
    """What pairs of blocks alone would call one: each pair of processes has a ratio of its own, around one."""
    rng = np.random.default_rng(1)
    alarms = {"processes": 0, "blocks": 0}
    for _ in range(200):
        ratio = np.repeat(np.exp(rng.normal(0, 0.03, 8)), 20)
        a = np.exp(rng.normal(0, 0.02, len(ratio)))
        b = ratio * np.exp(rng.normal(0, 0.02, len(ratio)))
        pairs = Pairs(a.tolist(), b.tolist(), [20] * 8)
        alarms["processes"] += compare_paired(*pairs.data()).p < 0.05
        alarms["blocks"] += compare_paired(a, b).p < 0.05
    assert alarms["processes"] / 200 < 0.08 < 0.4 < alarms["blocks"] / 200


@pytest.mark.parametrize(
    ("call_ms", "calls"), [(100, 1), (20, 1), (15, 1), (13, 2), (5, 4), (0.01, 2000), (1e-6, 10_000)]
)
def test_a_block_is_as_many_calls_as_come_nearest_to_twenty_milliseconds(call_ms, calls):
    assert block_calls(call_ms) == calls
