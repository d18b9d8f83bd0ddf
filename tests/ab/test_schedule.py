"""Blocks of A and B, the rules that end a comparison, and the verdict on all of them."""

import numpy as np
import pytest

from nanolib.ab.pairs import Pairs, Settings, Task, TaskResult
from nanolib.ab.run import lines_of
from nanolib.ab.schedule import (
    _compare,
    _judge,
    block_calls,
    ends_after,
    is_precise_enough,
    precise_enough,
)
from nanolib.stats.compare import paired_levels
from nanolib.stats.signed_ranks import capped_centre, hodges_lehmann

TASK = Task("call", "c1", {"name": "work:run"}, ({}, {}))


def _series(ratios, blocks=5):
    """Pairs of processes with these ratios, each with a number of pairs of blocks."""
    a = np.random.default_rng(0).lognormal(0, 0.1, blocks * len(ratios))
    return Pairs(a.tolist(), (a * np.repeat(ratios, blocks)).tolist(), [blocks] * len(ratios))


def test_a_pair_of_processes_is_the_datum_if_there_are_enough():
    ratios = [1.0, 1.1, 0.9, 1.2, 1.05, 1.15]
    both = _series(ratios[:3]) + _series(ratios[3:])
    a, b = both.data()
    assert list(a) == [1] * 6 and list(b) == pytest.approx(ratios)
    assert str(both) == "30 pairs in 6 pairs of processes"
    assert [len(blocks) for blocks in _series(ratios[:5]).data()] == [25, 25]


@pytest.mark.parametrize(("call_ms", "calls"), [(100, 1), (13, 2), (5, 4), (1e-6, 10_000)])
def test_a_block_is_as_many_calls_as_come_nearest_to_twenty_milliseconds(call_ms, calls):
    assert block_calls(call_ms) == calls


@pytest.mark.parametrize(
    ("number", "spent_s", "ends"),
    [(1, 99, False), (2, 40, False), (2, 40.1, True), (5, 50.1, True)],
)
def test_it_ends_before_it_takes_more_than_the_budget(number, spent_s, ends):
    assert ends_after(number, spent_s, 60) == ends


def test_a_pair_of_processes_is_precise_enough_at_its_share_of_the_precision():
    a, b = np.random.default_rng(2).lognormal(0, 0.1, (2, 20))
    low, _, high = hodges_lehmann(np.log(b / a))
    just = (high - low) / 2 / 20**0.5  # of twenty pairs of processes
    assert precise_enough(a, b, just * 1.001) and not precise_enough(a, b, just * 0.999)


def test_a_case_is_done_when_each_interval_is_narrow_and_rests_on_twenty_pairs_of_processes():
    rng = np.random.default_rng(4)
    narrow, wide = (_series(np.exp(rng.normal(0, spread, 20))) for spread in (0.001, 0.1))
    low, _, high = capped_centre(np.log(wide.data()[1]))
    just = (high - low) / 2
    for blocks, rel_ci, is_done in (
        ({"": narrow}, 0.01, True),
        ({"": narrow, "b": wide}, 0.01, False),
        ({"": wide}, just * 1.001, True),
        ({"": wide}, just * 0.999, False),
        ({"": _series(np.ones(19))}, 0.01, False),
        ({}, 0.01, False),
    ):
        assert is_precise_enough(blocks, rel_ci) == is_done


def test_tasks_are_judged_together_and_what_has_too_few_pairs_has_no_verdict():
    slow, few = _series([1.3, 1.31, 1.29, 1.32, 1.28, 1.3]), Pairs([1.0] * 5, [2.0] * 5, [5])
    results = [TaskResult(TASK, {"forward": slow, "backward": few}), TaskResult(TASK, {"": slow})]
    _judge(results, Settings())
    assert [list(result.verdicts) for result in results] == [["forward"], [""]]
    alone, found = _compare(slow, Settings()), results[0].verdicts["forward"]
    assert found.raw_p == alone.p and found.p == pytest.approx(2 * alone.p)


def test_base_and_current_have_the_ratio_that_is_shown():
    """Three of seven pairs of processes have many blocks and are far off, so the medians cross."""
    counts, ratios = [10] * 4 + [60] * 3, [1.16, 1.165, 1.17, 1.16, 0.7, 0.72, 1.5]
    a = np.repeat(20.0 + 0.5 * np.arange(7), counts)
    b = a * np.repeat(ratios, counts)
    assert np.median(b) < np.median(a)
    result = TaskResult(TASK, {"": Pairs(a.tolist(), b.tolist(), counts)})
    _judge([result], Settings())
    (line,) = lines_of(result, "latency", Settings())
    ratio = line.current / line.base
    assert ratio == pytest.approx(line.verdict.ratio) and ratio > 1.1
    assert line.change.startswith(f"{ratio - 1:+.1%} ")


def test_levels_are_the_medians_if_these_have_the_ratio_and_else_keep_their_middle():
    assert paired_levels([10, 20, 30], [11, 22, 33], 1.1) == pytest.approx((20, 22))
    low, high = paired_levels([10, 20, 30], [10, 20, 30], 1.21)
    assert (high / low, low * high) == pytest.approx((1.21, 400))
