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
from nanolib.cli.compare import show_comparison
from nanolib.compare.findings import Comparison
from nanolib.stats.compare import compare_paired, compare_processes, paired_levels
from nanolib.stats.signed_ranks import capped_centre, hodges_lehmann

TASK = Task("call", "c1", {"name": "work:run"}, ({}, {}))


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
    for _ in range(60):
        ratio = np.repeat(np.exp(rng.normal(0, 0.03, 8)), 20)
        a = np.exp(rng.normal(0, 0.02, len(ratio)))
        b = ratio * np.exp(rng.normal(0, 0.02, len(ratio)))
        pairs = Pairs(a.tolist(), b.tolist(), [20] * 8)
        alarms["processes"] += compare_processes(pairs.data()[1]).p < 0.05
        alarms["blocks"] += compare_paired(a, b).p < 0.05
    assert alarms["processes"] / 60 < 0.08 < 0.4 < alarms["blocks"] / 60


@pytest.mark.parametrize(
    ("call_ms", "calls"),
    [(100, 1), (13, 2), (5, 4), (1e-6, 10_000)],
)
def test_a_block_is_as_many_calls_as_come_nearest_to_twenty_milliseconds(call_ms, calls):
    assert block_calls(call_ms) == calls


@pytest.mark.parametrize(
    ("number", "spent_s", "ends"),
    [(1, 99, False), (2, 40, False), (2, 40.1, True), (5, 50.1, True)],
)
def test_it_ends_before_it_takes_more_than_the_budget(number, spent_s, ends):
    assert ends_after(number, spent_s, 60) == ends


def test_a_generation_is_precise_enough_at_its_share_of_the_rounds_precision():
    a = np.random.default_rng(2).lognormal(0, 0.1, 20)
    b = np.random.default_rng(3).lognormal(0, 0.1, 20)
    low, _, high = hodges_lehmann(np.log(b / a))
    just = (high - low) / 2 / 20**0.5  # of twenty generations
    assert precise_enough(a, b, just * 1.001) and not precise_enough(a, b, just * 0.999)


def test_tasks_are_judged_together_and_what_has_too_few_pairs_has_no_verdict():
    slow, few = _series(6, [1.3, 1.31, 1.29, 1.32, 1.28, 1.3]), Pairs([1.0] * 5, [2.0] * 5, [5])
    alone = _compare(slow, Settings())
    first = TaskResult(TASK, {"forward": slow, "backward": few})
    second = TaskResult(TASK, {"forward": slow})
    _judge([first, second], Settings())
    assert set(first.verdicts) == set(second.verdicts) == {"forward"}
    found = first.verdicts["forward"]
    assert found.raw_p == alone.p and found.p == pytest.approx(2 * alone.p)


def test_a_case_is_done_when_each_interval_is_narrow_and_rests_on_twenty_pairs_of_processes():
    rng = np.random.default_rng(4)
    narrow, wide = (_series(20, np.exp(rng.normal(0, spread, 20))) for spread in (0.001, 0.1))
    assert is_precise_enough({"": narrow}, 0.01) and not is_precise_enough(
        {"": narrow, "b": wide}, 0.01
    )
    low, _, high = capped_centre(np.log(wide.data()[1]))
    assert is_precise_enough({"": wide}, (high - low) / 2 * 1.001) and not is_precise_enough(
        {}, 0.01
    )
    assert not is_precise_enough({"": _series(19, np.ones(19))}, 0.01)


@pytest.fixture
def compared():
    """Seven pairs of processes; three of them, of many blocks, lie far off, so that the medians of A and B cross."""
    counts, ratios = [10] * 4 + [60] * 3, [1.16, 1.165, 1.17, 1.16, 0.7, 0.72, 1.5]
    a = np.concatenate([np.full(n, 20.0 + 0.5 * at) for at, n in enumerate(counts)])
    b = a * np.repeat(ratios, counts)
    assert np.median(b) < np.median(a)
    task = Task("call", "c1", {"name": "work:run"}, ({}, {}))
    result = TaskResult(task, {"": Pairs(a.tolist(), b.tolist(), counts)})
    _judge([result], Settings())
    assert result.verdicts[""].ratio > 1.1
    return result


def test_base_and_current_have_the_ratio_that_is_shown(compared, capsys):
    (line,) = lines_of(compared, "latency", Settings())
    ratio = line.current / line.base
    assert ratio == pytest.approx(line.verdict.ratio) and line.change.startswith(
        f"{ratio - 1:+.1%} "
    )
    show_comparison(Comparison.of([line], True, 0.05), True, None, None)
    shown = capsys.readouterr().out
    assert f"{line.base:.2f}" in shown and f"{line.current:.2f}" in shown


def test_levels_are_the_medians_where_these_have_the_ratio_and_else_keep_their_middle():
    assert paired_levels([10, 20, 30], [11, 22, 33], 1.1) == pytest.approx((20, 22))
    low, high = paired_levels([10, 20, 30], [10, 20, 30], 1.21)
    assert (high / low, low * high) == pytest.approx((1.21, 400))
