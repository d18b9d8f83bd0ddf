import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.compare.runs import block_medians, compare_rows
from nanolib.compare.spread import KEY, repeats
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.meters.time.latency import summarize
from nanolib.store import Run, Store
from tests.store.rows import MACHINE


def measured(seed, level=10.0, flops=100.0, memory=8.0, flags=(), blocks=40):
    """The measurements of a case that ended well."""
    times = level * np.exp(0.01 * np.random.default_rng(seed).normal(size=blocks))
    latency = summarize(times, scope="forward")
    return [
        Measurement("case_duration", 1.0),
        replace(latency, flags=flags or latency.flags),
        exact("flops", flops, scope="forward"),
        exact("peak_memory", memory, scope="forward"),
    ]


def failed(status=Status.ERROR):
    return [Measurement("case_duration", 1.0, status=status, message="why")]


def run_of(cases, run_id, experiment="attention", **rest):
    rows = {name: ({"name": name, "seq_len": 8}, found) for name, found in cases.items()}
    return Run(experiment, MACHINE, rows=rows, run_id=run_id, **rest)


def _earlier_runs(rows):
    """Of each timing in `rows` six runs of one revision that lie close together."""
    timings = rows.loc[rows["metric"] == "latency", KEY].assign(git_revision="rev", fingerprint="")
    runs = (timings.assign(run_id=f"earlier{at}", estimate=10 + at / 100) for at in range(6))
    return repeats(runs)


@pytest.fixture
def found(tmp_path):
    numbers = itertools.count()

    def compare(base, current, **options):
        """Compare the cases of two sides; several runs of a side are a list, the oldest first."""
        with Store(tmp_path / f"{next(numbers)}.sqlite") as store:
            rows = []
            for side in (base, current):
                runs = side if isinstance(side, list) else [side]
                ids = [f"{len(rows)}-{at}" for at in range(len(runs))]
                for run_id, cases in zip(ids, runs, strict=True):
                    store.add(run_of(cases, run_id))
                rows.append(store.measurements(ids, samples=True))
        return compare_rows(*rows, repeats=_earlier_runs(rows[1]), **options)

    return compare


def _lines(comparison):
    return {(line.case.split()[0], line.metric.split(" ")[0]): line for line in comparison.lines}


@pytest.mark.parametrize(
    ("memory", "finding"),
    [
        (8.5, "regressed"),
        (8.375, "changed"),  # at the threshold
        (8.0, "equivalent"),
        (7.5, "improved"),
    ],
)
def test_memory_is_compared_with_the_threshold_and_flops_with_none(found, memory, finding):
    sides = {"a": measured(1)}, {"a": measured(1, memory=memory, flops=100 + 1e-9)}
    comparison = found(*sides, threshold=3 / 64)
    lines = _lines(comparison)
    assert lines["a", "peak_memory"].finding == finding
    assert lines["a", "flops"].finding == "changed"
    assert comparison.regressed == (finding == "regressed")


def test_a_finding_has_its_sides_and_its_change(found):
    base = {"a": measured(1), "slow": measured(2), "gone": measured(4)}
    current = {"a": measured(1, memory=10.0), "slow": measured(5, 12), "new": measured(7)}
    comparison = found(base, current)
    lines = _lines(comparison)
    slow, gone, new = lines["slow", "latency"], lines["gone", ""], lines["new", ""]
    low, ratio, high = slow.verdict.interval
    assert slow.change == f"{ratio - 1:+.1%} [{low - 1:+.1%} … {high - 1:+.1%}]"
    assert low < 1.2 < high and slow.message == ""
    assert slow.current / slow.base == pytest.approx(ratio)  # the change is that of the two columns
    assert (gone.finding, gone.message, gone.base) == ("missing", "not in current", None)
    assert (new.finding, new.message, new.change) == ("new", "not in base", "—")
    table, worst = comparison.table(), comparison.table(everything=False)
    assert set(table["verdict"]) - set(worst["verdict"]) == {"equivalent"}
    row = table[table["metric"] == "peak_memory forward, MiB"].iloc[0].to_dict()
    assert row == {"verdict": "regressed", "experiment": "attention", "case": "a seq_len=8", "metric": "peak_memory forward, MiB",
                   "base": "8", "current": "10", "change": "+25.00%", "note": ""}  # fmt: skip


def test_the_newest_run_of_a_case_counts_on_either_side_also_if_it_failed(found):
    base, current = ([{"a": measured(1, level)} for level in side] for side in ((30, 10), (5, 12)))
    assert _lines(found(base, current))["a", "latency"].verdict.ratio == pytest.approx(1.2)
    comparison = found(base, [*current, {"a": failed()}])
    assert comparison.counts == {"failed": 1} and not comparison.regressed


def test_a_metric_that_is_gone_from_a_case_that_is_ok_is_missing(found):
    current = {"a": measured(1)[:1], "b": failed(Status.OOM)}
    comparison = found({"a": measured(1), "b": measured(2)}, current)
    missing = [line for line in comparison.lines if line.finding == "missing"]
    assert {line.case for line in missing} == {"a seq_len=8"} and len(missing) == 3
    assert {line.change for line in missing} == {"—"}
    assert comparison.lost


def test_what_gets_no_verdict_leaves_the_others_theirs(found):
    base = {name: measured(at) for at, name in enumerate(("unsteady", "short", "slow"))}
    unsteady = measured(5, flags=(Flag.NO_STEADY_STATE,))
    current = {"unsteady": unsteady, "short": measured(6, blocks=4), "slow": measured(7, 20)}
    lines = _lines(found(base, current))
    told = {name: lines[name, "latency"].finding for name in base}
    assert told == {"unsteady": "inconclusive", "short": "inconclusive", "slow": "regressed"}


def test_a_run_against_its_own_rows_is_equivalent_however_noisy(tmp_path):
    noisy = {"a": measured(1, blocks=4), "b": measured(2, flags=(Flag.NO_STEADY_STATE,))}
    with Store(tmp_path / "s.sqlite") as store:
        store.add(run_of(noisy, "x"))
        rows = store.measurements(samples=True)
    comparison = compare_rows(rows, rows)
    assert set(comparison.counts) == {"equivalent"}
    assert [line.message for line in comparison.lines].count("the same run") == 2


def test_the_exit_code_is_one_on_a_regression_and_only_then(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        for at in range(4):
            store.add(run_of({"a": measured(10 + at)}, f"earlier{at}", git_revision="rev"))
        store.add(run_of({"a": measured(1)}, "aaaa", label="before"))
        store.add(run_of({"a": measured(2, 12)}, "bbbb", label="after"))

    def nano(*words):
        return CliRunner().invoke(main, ["compare", *words, "--output", str(tmp_path)])

    files = tmp_path / "c.json", tmp_path / "c.md"
    ended = nano("before", "after", "--json", str(files[0]), "--markdown", str(files[1]))
    assert ended.exit_code == 1 and "regressed" in ended.output and "drift" in ended.output
    assert json.loads(files[0].read_text())["regressed"] is True
    assert "| regressed |" in files[1].read_text()
    better = nano("after", "before")
    assert better.exit_code == 0 and "1 improved" in better.output
    assert nano("before", "after", "--threshold", "30%").exit_code == 0


def test_a_block_is_told_by_its_median_and_one_that_is_not_whole_is_left_out():
    samples = [*(1, 2, 9), *(3, 4, 50), *(5, 6, 70), *(8, 8)]
    details = {"calls_per_block": 3, "warmup_cut": 3}
    assert list(block_medians({"details": details, "samples": samples})) == [4, 6]


def test_the_worst_comes_first(found):
    base = {name: measured(at) for at, name in enumerate("abcd")}
    current = {"a": measured(11, 14), "b": measured(12, 20, memory=16.0), "c": failed()}
    lines = found(base, current | {"e": measured(13)}).lines
    told = [f"{line.finding} {line.case[0]}" for line in lines if line.finding != "equivalent"]
    assert told == ["regressed b", "regressed b", "regressed a", "failed c", "missing d", "new e"]


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [(0.0, 0.0, "equivalent"), (0.0, 1.0, "regressed"), (8.0, 0.0, "improved")],
)
def test_memory_that_was_or_is_nothing_has_a_finding_and_no_figure_is_no_change(
    found, before, after, finding
):
    nothing = [exact("flops", float("nan"), scope="backward")]
    sides = ({"a": measured(1, memory=memory) + nothing} for memory in (before, after))
    comparison = found(*sides)
    line = _lines(comparison)["a", "peak_memory"]
    assert not any("backward" in one.metric for one in comparison.lines)
    assert line.finding == finding and line.change == ("-100.00%" if before else "—")


def test_what_failed_before_and_now_is_neither_lost_nor_missing(found):
    comparison = found({"a": failed(Status.OOM), "b": measured(1)[:1]}, {"a": failed()})
    assert comparison.counts == {"missing": 1, "inconclusive": 1}


@pytest.mark.parametrize("side", [0, 1])
def test_a_timing_needs_a_steady_state_and_valid_samples_on_both_sides(found, side):
    sides = [{name: measured(at + 2 * n) for n, name in enumerate("abc")} for at in (1, 9)]
    unsteady, bare, zero = (sides[side][name] for name in "abc")
    zero[1] = replace(zero[1], samples=(0.0, *zero[1].samples[1:]))
    unsteady[1] = replace(unsteady[1], flags=(Flag.NO_STEADY_STATE,))
    bare[1] = replace(bare[1], samples=())
    lines = _lines(found(*sides))
    assert "no steady state in one run" in lines["a", "latency"].message
    assert lines["b", "latency"].message == "a time without samples; no verdict"
    assert lines["c", "latency"].message == "a time that is not above 0; no verdict"
