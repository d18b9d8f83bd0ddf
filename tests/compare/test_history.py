from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from nanolib.compare.history import Change, History, find_steps, histories, table
from nanolib.measurement import Measurement
from nanolib.report.overview import compare_with_earlier, history_verdict
from nanolib.stats.changes import PENALTY
from tests.compare.test_compare import measured, run_of
from tests.processes import invoked
from tests.store import conftest


def _run(index, level, flops=100.0, revision=None, more=()):
    cases = {"dense": [*measured(index, level, flops), *more]}
    return run_of(cases, f"run{index}", git_revision=revision or f"rev{index}")


def _histories(store, metric="latency"):
    return histories(store.figures(metric, ["m1"]), metric)


def _since_before(store, run_ids):
    return compare_with_earlier(store, run_ids, store.figures("latency", ["m1"]))


store = conftest.store


def test_cases_of_one_name_are_told_apart_by_the_factors_in_which_they_differ(store):
    shape = {"name": "dense", "seq_len": 8}
    shapes = {"a": {**shape, "head_dim": 128, "options": {"a": 1}}, "b": {**shape, "head_dim": 64}}
    for index in range(10):
        levels = {"a": 9.0, "b": 10.0 if index < 6 else 12.0}
        run = run_of(
            {name: measured(index, level) for name, level in levels.items()}, f"run{index}"
        )
        rows = {name: (shapes[name], found) for name, (_, found) in run.rows.items()}
        store.add(replace(run, rows=rows, git_revision=f"rev{index}"))
    found = _histories(store)
    narrow, wide = "dense seq_len=8 head_dim=64 options=none", "dense seq_len=8 head_dim=128"
    assert {one.case: len(one.changes) for one in found} == {
        narrow: 1,
        f"{wide} options={{'a': 1}}": 0,
    }
    assert str(history_verdict(found)[1]).startswith(f"attention {narrow} forward became worse")
    lines = _since_before(store, ["run6"]).lines
    assert {line.case for line in lines} == {one.case for one in found}


def test_runs_are_held_against_the_ones_before_and_the_spread_of_earlier_ones(store):
    assert _since_before(store, []) is None
    store.add(_run(0, 10.0))
    assert _since_before(store, ["run0"]) is None and not _histories(store)
    store.add(_run(1, 13.0))
    found = _since_before(store, ["run1"])
    assert (found.lines[0].finding, found.has_regressed) == ("suspect", False)
    assert found.lines[0].verdict.ratio == pytest.approx(1.3, rel=0.01)
    for index in range(2, 7):
        store.add(_run(index, 10.0, revision="same"))
    store.add(_run(7, 13.0))
    assert _since_before(store, ["run7"]).has_regressed


def history_of(case, values, *changes, metric="latency"):
    points = pd.DataFrame({"estimate": values, "low": values, "high": values})
    return History("model", case, metric, "decode", points, changes)


def test_the_table_of_histories_has_a_line_each_with_its_changes():
    early, late = Change(2, 1.25, True, "a", "b"), Change(5, 0.8, False, "c", "")
    lines = table(
        [history_of("late", [8.0] * 6 + [10.0], early, late), history_of("flat", [2.0, 4.0])]
    )
    assert list(lines["last / first"]) == ["+25.0%", "+100.0%"]
    assert list(lines["changes"]) == ["+25.0% between a and b; -20.0% between c and ?", ""]


def test_the_history_with_the_latest_change_comes_first_and_a_flat_one_last(store):
    for index in range(12):
        moved = {"flat": False, "early": index > 4, "late": index > 6}
        cases = {name: measured(index, 10 + 2 * up) for name, up in moved.items()}
        store.add(run_of(cases, f"run{index}"))
    assert [one.case.split()[0] for one in _histories(store)] == ["late", "early", "flat"]


@pytest.mark.parametrize(
    ("metric", "ratio", "is_worse"),
    [
        ("latency", 1.2, True),
        ("latency", 0.8, False),
        ("tokens_per_second", 0.8, True),
        ("flops", 0.8, True),
    ],
)
def test_which_way_is_worse_follows_the_metric(metric, ratio, is_worse):
    values, revisions = [10.0] * 5 + [10.0 * ratio] * 5, [f"r{at}" for at in range(10)]
    points = history_of("", values).points.assign(git_revision=revisions)
    assert find_steps(points, metric) == (Change(5, pytest.approx(ratio), is_worse, "r4", "r5"),)


def test_an_interval_counts_by_its_relative_width():
    """Ten values with a step in the middle, which shows if it gains the penalty."""
    values, n = np.array([10.0] * 5 + [12.0] * 5), 10
    reach = 1.96 * np.log(1.2) * np.sqrt(n / 4 / (PENALTY * np.log(n)))
    for share, places in ((0.99, [5]), (1.01, [])):
        ends = {"low": values * (1 - share * reach), "high": values * (1 + share * reach)}
        points = history_of("", values).points.assign(**ends, git_revision=list("abcdefghij"))
        assert [change.index for change in find_steps(points, "latency")] == places


@pytest.fixture
def nano(tmp_path):
    def history(metric, *more):
        return invoked("history", "--metric", metric, "--output", tmp_path, *more)

    return history


def test_values_of_0_or_less_are_left_out_and_the_terminal_says_what_is_missing(store, nano):
    for index, flops in enumerate((0.0, 40.0, 50.0, 50.0, 0.0)):
        lost = Measurement("loss_difference", 0.5 - index, scope="forward")
        store.add(_run(index, 10.0, flops, more=[lost]))
    assert "no history yet: no value above 0 was" in nano("loss_difference").output
    (history,) = _histories(store, "flops")
    assert list(history.points["estimate"]) == [40.0, 50.0, 50.0]


def test_a_change_is_named_with_the_revisions_around_it(store, nano):
    for index in range(13):
        store.add(_run(index, {12: 16.0}.get(index, 10.0 if index < 6 else 12.0)))
    (history,) = _histories(store)
    (change,) = history.changes
    assert (change.index, change.before, change.after, change.worse) == (6, "rev5", "rev6", True)
    assert change.ratio == pytest.approx(1.2, rel=0.01)
    ended = nano("latency")
    assert ended.exit_code == 0
    assert ended.output.splitlines()[-2:] == [
        "1 of 1 timings changed their level over up to 13 runs",
        f"attention dense seq_len=8 forward became worse: {change}. "
        "Next: run nano ab rev5 rev6 attention",
    ]


@pytest.mark.parametrize(
    ("revisions", "metric", "command"),
    [
        (("a", "b"), "latency", "nano ab a b model"),
        (("a", "b"), "tokens_per_second", ""),
        (("a", "a"), "latency", ""),
        (("a", "b+"), "latency", ""),
        (("", "b"), "latency", ""),
    ],
)
def test_a_command_measures_times_of_two_committed_revisions(revisions, metric, command):
    step = Change(3, 1.25, True, *revisions)
    assert history_of("dense", [], step, metric=metric).command == command
