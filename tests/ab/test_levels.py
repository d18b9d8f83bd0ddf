"""What stands beside a ratio of two versions: levels that have this ratio, wherever they are shown."""

import numpy as np
import pytest

from nanolib.ab.pairs import Pairs, Settings, Task, TaskResult
from nanolib.ab.run import lines_of
from nanolib.ab.schedule import _judge
from nanolib.cli.compare import show_comparison
from nanolib.compare.findings import Comparison
from nanolib.stats.compare import paired_levels


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
