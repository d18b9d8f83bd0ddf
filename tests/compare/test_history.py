import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.compare.history import Change, History, find_steps, histories, since_before, table
from nanolib.measurement import Measurement, exact
from nanolib.meters.time.latency import summarize
from nanolib.report.regressions import history_verdict
from nanolib.stats.changes import PENALTY
from nanolib.store import Run, Store
from tests.store.rows import MACHINE


def _run(index, level, flops=100.0, revision=None, more=()):
    wiggle = 1 + 0.002 * (index % 3)
    times = [level * wiggle * (1 + 0.001 * (i % 7)) for i in range(40)]
    rows = [Measurement("case_duration", 1.0), summarize(times, scope="forward")]
    rows += [exact("flops", flops, scope="forward"), *more]
    cases = {"c1": ({"name": "dense", "seq_len": 8, "dtype": "float32"}, rows)}
    named = {"run_id": f"run{index}", "git_revision": revision or f"rev{index}"}
    return Run("attention", MACHINE, rows=cases, **named)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "results.sqlite") as made:
        yield made


def test_a_change_is_named_with_the_revisions_around_it(store):
    for index in range(10):
        store.add(_run(index, 10.0 if index < 6 else 12.0))
    (history,) = histories(store, machine_ids=["m1"])
    (change,) = history.changes
    assert (change.at, change.before, change.after, change.worse) == (6, "rev5", "rev6", True)
    assert change.ratio == pytest.approx(1.2, rel=0.01)
    assert str(change) == f"{change.ratio - 1:+.1%} between rev5 and rev6"
    said = str(history_verdict([history])[1])
    assert said.startswith("attention dense seq_len=8 dtype=float32 forward became worse: +")


def test_cases_of_one_name_are_told_apart_by_the_factors_in_which_they_differ(store):
    for index in range(10):
        rows = _run(index, 10.0 if index < 6 else 12.0).rows["c1"][1]
        shape = {"name": "dense", "seq_len": 8}
        cases = {
            "wide": (
                {**shape, "head_dim": 128, "options": {"a": 1}},
                _run(index, 9.0).rows["c1"][1],
            ),
            "narrow": ({**shape, "head_dim": 64}, rows),
        }
        named = {"run_id": f"run{index}", "git_revision": f"rev{index}"}
        store.add(Run("attention", MACHINE, rows=cases, **named))
    found = histories(store, machine_ids=["m1"])
    narrow, wide = "dense seq_len=8 head_dim=64 options=none", "dense seq_len=8 head_dim=128"
    assert {one.case: len(one.changes) for one in found} == {
        narrow: 1,
        f"{wide} options={{'a': 1}}": 0,
    }
    assert str(history_verdict(found)[1]).startswith(f"attention {narrow} forward became worse")
    lines = since_before(store, ["run6"]).lines
    assert {line.case for line in lines} == {one.case for one in found}


def test_runs_are_held_against_the_ones_before_and_the_spread_of_earlier_ones(store):
    assert since_before(store, []) is None
    store.add(_run(0, 10.0))
    assert since_before(store, ["run0"]) is None and not histories(store, machine_ids=["m1"])
    assert "no history yet" in history_verdict([])[0].text
    store.add(_run(1, 13.0))
    found = since_before(store, ["run1"])
    assert (found.lines[0].finding, found.regressed) == ("suspect", False)
    assert found.lines[0].verdict.ratio == pytest.approx(1.3, rel=0.01)
    for index in range(2, 7):
        store.add(_run(index, 10.0, revision="same"))
    store.add(_run(7, 13.0))
    assert since_before(store, ["run7"]).regressed


def test_a_deterministic_figure_that_was_nothing_changes_too(store):
    for index, flops in enumerate((0.0, 0.0, 50.0, 50.0, 0.0)):
        store.add(_run(index, 10.0, flops=flops))
    (history,) = histories(store, "flops", ["m1"])
    assert [(change.at, change.worse) for change in history.changes] == [(2, True), (4, True)]
    assert [str(change).split(" between")[0] for change in history.changes] == ["from 0", "-100.0%"]


def test_series_without_a_ratio_are_named_and_json_has_no_infinity(store, tmp_path):
    for index, flops in enumerate((0.0, 50.0)):
        lost = Measurement("loss_difference", 0.5 - index, scope="forward")
        store.add(_run(index, 10.0, flops, more=[lost]))

    def nano(metric, *more):
        asked = ["history", "--metric", metric, "--output", str(tmp_path), *more]
        return CliRunner().invoke(main, asked)

    told = nano("loss_difference").output
    assert "1 series with a value of 0 or less were not searched for changes" in told
    assert "0 or less" not in nano("latency").output + nano("flops").output
    assert "a change needs" in told and "a change needs" not in nano("flops").output
    (shown,) = json.loads(nano("flops", "--json").stdout)["shown"]
    assert [change["ratio"] for change in shown["changes"]] == [None]


def _history(case, values, *changes, metric="latency"):
    points = pd.DataFrame({"estimate": values, "low": values, "high": values})
    return History("m1", "model", case, "c", metric, "decode", points, changes)


def test_the_table_of_histories_has_the_latest_change_first_and_flat_ones_last():
    early, late = Change(2, 1.25, True, "a", "b"), Change(5, 0.8, False, "c", "")
    flat, first = _history("flat", [0.0, 4.0]), _history("early", [10.0] * 6 + [12.5], early)
    lines = table([flat, first, _history("late", [8.0] * 7, early, late)])
    assert list(lines["case"]) == ["late", "early", "flat"]
    assert list(lines["last / first"]) == ["+0.0%", "+25.0%", ""]
    assert lines["changes"][0] == "+25.0% between a and b; -20.0% between c and ?"
    assert list(lines.loc[1, ["metric", "first", "last"]]) == ["latency decode, ms", "10", "12.50"]
    assert "machine" not in lines
    (line,) = table([first]).to_dict("records")
    other = replace(first, machine_id="m2345678")
    assert table([first, other]).to_dict("records") == [
        {"machine": "m1", **line},
        {"machine": "m23456", **line},
    ]


@pytest.mark.parametrize(
    ("metric", "ratio", "is_worse"),
    [("latency", 1.2, True), ("latency", 0.8, False), ("tokens_per_second", 0.8, True)],
)
def test_which_way_is_worse_follows_the_metric(metric, ratio, is_worse):
    values, revisions = [10.0] * 5 + [10.0 * ratio] * 5, [f"r{at}" for at in range(10)]
    points = _history("", values).points.assign(confidence=0.95, git_revision=revisions)
    change = Change(5, pytest.approx(ratio), is_worse, "r4", "r5")
    assert find_steps(points, metric) == ((change,), None)
    assert find_steps(points.assign(estimate=[0.0, *values[1:]]), metric)[0] == ()
    wide = points.assign(low=points["estimate"] * 0.1, high=points["estimate"] * 1.9)
    assert find_steps(wide, metric)[0] == ()  # the intervals are wider than the change


def test_a_last_run_that_sticks_out_is_named_and_is_no_change_yet(store, tmp_path):
    for index in range(8):
        store.add(_run(index, 10.0 if index < 7 else 13.0))
    (history,) = histories(store, machine_ids=["m1"])
    assert not history.changes and str(history.newest).endswith(" rev6 and rev7, in 1 run so far")
    *_, said = map(str, history_verdict([history]))
    assert "may have changed recently" in said and said.endswith(
        "Next: run nano ab rev6 rev7 attention."
    )
    ended = CliRunner().invoke(main, ["history", "--output", str(tmp_path)])
    assert ended.exit_code == 0 and "latency changed in 0 of 1 series" in ended.output
    assert "in 1 series, only the last one or two runs differ" in ended.output
    assert ended.output.splitlines()[-2:] == [
        "to measure, in turns, the revisions before and after a change:",
        "  nano ab rev6 rev7 attention",
    ]


@pytest.mark.parametrize(
    ("revisions", "metric", "command", "text"),
    [
        (("a", "b"), "latency", "nano ab a b model", "between a and b"),
        (
            ("a", "b"),
            "tokens_per_second",
            "nano ab a b model --metric tokens_per_second",
            "between a and b",
        ),
        (
            ("a", "a"),
            "latency",
            "",
            "at the same revision a; check your code, the machine and its packages",
        ),
        (("a", "b+"), "latency", "", "between a and b+"),
        (("", ""), "latency", "", "between runs without a revision; check the code, the machine"),
        (("a", "b"), "peak_memory", "", "between a and b"),
    ],
)
def test_a_step_says_where_to_look_and_which_command_measures_it(revisions, metric, command, text):
    change = Change(3, 1.25, True, *revisions)
    assert str(change).startswith(f"+25.0% {text}")
    assert _history("dense", [], change, metric=metric).command == command


@pytest.mark.parametrize(("confidence", "deviations"), [(0.8, 1.2816), (0.95, 1.96), (None, 1.96)])
def test_an_interval_counts_by_its_confidence_and_its_relative_width(confidence, deviations):
    """Ten values with a step in the middle, which shows if it gains the penalty."""
    values, n = np.array([10.0] * 5 + [12.0] * 5), 10
    reach = deviations * np.log(1.2) * np.sqrt(n / 4 / (PENALTY * np.log(n)))
    for share, places in ((0.99, [5]), (1.01, [])):
        low, high = values * (1 - share * reach), values * (1 + share * reach)
        points = pd.DataFrame({"estimate": values, "low": low, "high": high})
        points = points.assign(confidence=confidence, git_revision=list("abcdefghij"))
        assert [change.at for change in find_steps(points, "latency")[0]] == places


def test_two_runs_that_differ_are_two_so_far():
    assert str(Change(8, 1.5, True, "a", "b", runs=2)) == "+50.0% between a and b, in 2 runs so far"


def test_a_case_is_missing_only_if_the_same_parameters_measured_it_before(store):
    (factors, rows) = _run(0, 10.0).rows["c1"]
    for at, (lengths, cases) in enumerate(
        (([8, 16], "xy"), ([8], "x"), ([8, 16], "xy"), ([8, 16], "x"))
    ):
        made = {name: (factors | {"name": name}, rows) for name in cases}
        run = {"run_id": f"run{at}", "params": {"seq_lens": lengths}, "label": str(at)}
        store.add(Run("attention", MACHINE, rows=made, **run))

    def missing(run_id):
        lines = since_before(store, [run_id]).lines
        return [line.case for line in lines if line.finding == "missing"]

    assert missing("run1") == missing("run2") == []
    assert [case.split()[0] for case in missing("run3")] == ["y"]
