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


def _case(
    seed, level=10.0, flops=100.0, memory=8.0, status=Status.OK, flags=(), blocks=40, spread=0.01
):
    if status is not Status.OK:
        return [Measurement("case_duration", 1.0, status=status, message="why")]
    times = level * np.exp(spread * np.random.default_rng(seed).normal(size=blocks))
    latency = summarize(times, scope="forward")
    return [
        Measurement("case_duration", 1.0),
        replace(latency, flags=flags or latency.flags),
        exact("flops", flops, scope="forward"),
        exact("peak_memory", memory, scope="forward"),
    ]


def _run(cases, run_id, **rest):
    rows = {
        name: ({"name": name, "seq_len": 8}, measurements) for name, measurements in cases.items()
    }
    return Run("attention", MACHINE, rows=rows, run_id=run_id, **rest)


def _earlier_runs(rows):
    """Of each timing in `rows` six runs of one revision that lie close together."""
    rng = np.random.default_rng(0)
    timings = rows.loc[rows["metric"] == "latency", KEY]
    figures = []
    for at in range(6):
        estimate = 10 * np.exp(rng.normal(0, 0.001, len(timings)))
        named = {"run_id": f"earlier{at}", "git_revision": "rev"}
        figures.append(timings.assign(estimate=estimate, **named))
    return repeats(figures)


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
                    store.add(_run(cases, run_id))
                rows.append(store.measurements(ids, samples=True))
        return compare_rows(*rows, **{"repeats": _earlier_runs(rows[1])} | options)

    return compare


def _finding(comparison, metric):
    return next(line.finding for line in comparison.lines if line.metric.startswith(metric))


@pytest.mark.parametrize(
    ("memory", "finding"),
    [
        (1073.0, "regressed"),
        (1072.0, "changed"),  # at the threshold
        (1024.0, "equivalent"),
        (975.0, "improved"),
    ],
)
def test_memory_is_compared_with_the_threshold(found, memory, finding):
    sides = ({"a": _case(1, memory=one)} for one in (1024.0, memory))
    comparison = found(*sides, threshold=3 / 64)
    assert _finding(comparison, "peak_memory") == finding
    assert comparison.regressed == (finding == "regressed")


@pytest.mark.parametrize(
    ("level", "finding"),
    [(10.4, "suspect"), (10.7, "regressed"), (9.6, "suspect"), (9.3, "improved")],
)
def test_a_latency_is_compared_with_the_threshold(found, level, finding):
    sides = {"a": _case(1)}, {"a": _case(3, level=level)}
    assert _finding(found(*sides), "latency") == finding
    assert _finding(found(*sides, threshold=0.5), "latency") != "regressed"


@pytest.mark.parametrize("flops", [99.0, 100.0 + 1e-9])
def test_a_deterministic_metric_has_no_threshold(found, flops):
    comparison = found({"a": _case(1)}, {"a": _case(1, flops=flops)}, threshold=0.9)
    assert _finding(comparison, "flops") == "changed"


def test_a_finding_has_its_sides_its_change_and_what_it_leaves_open(found):
    base = {"a": _case(1, memory=8.0), "slow": _case(2), "noisy": _case(3), "gone": _case(4)}
    current = {"a": _case(1, memory=10.0), "slow": _case(5, level=12), "new": _case(7)}
    comparison = found(base, current | {"noisy": _case(8, spread=0.1)})
    lines = {(line.case.split()[0], line.metric): line for line in comparison.lines}
    memory, slow = lines["a", "peak_memory forward"], lines["slow", "latency forward"]
    assert (memory.base, memory.current, memory.change) == (8.0, 10.0, "+25.00%")
    low, ratio, high = slow.verdict.interval
    assert slow.change == f"{ratio - 1:+.1%} [{low - 1:+.1%} … {high - 1:+.1%}]"
    assert low < 1.2 < high and slow.message == ""
    assert slow.current / slow.base == pytest.approx(ratio)  # the change is that of the two columns
    noisy, gone, new = lines["noisy", "latency forward"], lines["gone", ""], lines["new", ""]
    detectable = f"minimum detectable change: {noisy.verdict.minimum_detectable_effect:.1%}"
    assert (noisy.finding, noisy.message) == ("inconclusive", detectable)
    assert (gone.finding, gone.message, gone.base) == ("missing", "not in current", None)
    assert (new.finding, new.message, new.change) == ("new", "not in base", "—")
    table, worst = comparison.table(), comparison.table(everything=False)
    assert set(table["verdict"]) - set(worst["verdict"]) == {"equivalent"}
    row = table[table["metric"] == "peak_memory forward, MiB"].iloc[0].to_dict()
    assert row == {"verdict": "regressed", "experiment": "attention", "case": "a seq_len=8", "metric": "peak_memory forward, MiB",
                   "base": "8", "current": "10", "change": "+25.00%", "note": ""}  # fmt: skip
    exported = comparison.to_dict()
    assert exported["counts"] == comparison.counts and exported["regressed"]
    line = next(line for line in exported["lines"] if line.get("ratio") == ratio)
    ends = {"low": low, "high": high, "p": slow.verdict.p, "base": slow.base}
    assert line.items() >= ends.items()


def test_the_newest_run_of_a_case_counts_on_either_side_also_if_it_failed(found):
    levels = [[30, 10], [5, 12]]
    sides = [[{"a": _case(1, level=level)} for level in side] for side in levels]
    line = next(line for line in found(*sides).lines if line.metric == "latency forward")
    assert line.verdict.ratio == pytest.approx(1.2, rel=0.02)
    failed = [{"a": _case(2, level=20)}, {"a": _case(3, status=Status.ERROR)}]
    comparison = found({"a": _case(1)}, failed)
    assert comparison.counts == {"failed": 1} and not comparison.regressed


def test_a_metric_that_is_gone_from_a_case_that_is_ok_is_missing(found):
    current = {"a": _case(1)[:1], "b": _case(2, status=Status.OOM)}
    comparison = found({"a": _case(1), "b": _case(2)}, current)
    missing = [line for line in comparison.lines if line.finding == "missing"]
    names = [f"a seq_len=8 {metric} forward" for metric in ("latency", "flops", "peak_memory")]
    assert [f"{line.case} {line.metric}" for line in missing] == names and comparison.lost


def test_what_gets_no_verdict_leaves_the_others_theirs(found):
    base = {"same": _case(1), "unsteady": _case(2), "short": _case(3), "slow": _case(4)}
    current = {
        "unsteady": _case(5, flags=(Flag.NO_STEADY_STATE,)),
        "short": _case(6, blocks=4),
        "slow": _case(7, level=20),
    }
    comparison = found(base, current)
    told = {
        line.case.split()[0]: line.finding
        for line in comparison.lines
        if line.metric == "latency forward"
    }
    assert told == {"unsteady": "inconclusive", "short": "inconclusive", "slow": "regressed"}


def test_a_run_against_its_own_rows_is_equivalent_however_noisy(tmp_path):
    with Store(tmp_path / "s.sqlite") as store:
        store.add(
            _run({"a": _case(1, blocks=4), "b": _case(2, flags=(Flag.NO_STEADY_STATE,))}, "x")
        )
        rows = store.measurements(samples=True)
    comparison = compare_rows(rows, rows)
    assert set(comparison.counts) == {"equivalent"}
    assert [line.message for line in comparison.lines if line.metric == "latency forward"] == [
        "the same run"
    ] * 2


@pytest.fixture
def nano(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        for at in range(4):
            store.add(_run({"a": _case(10 + at)}, f"earlier{at}", git_revision="rev"))
        store.add(_run({"a": _case(1)}, "aaaa", label="before", suite="quick"))
        store.add(_run({"a": _case(2, level=12)}, "bbbb", label="after"))
    return lambda *args: CliRunner().invoke(main, ["compare", *args, "--output", str(tmp_path)])


def test_the_exit_code_is_one_on_a_regression_and_only_then(nano, tmp_path):
    ended = nano(
        "before", "after", "--json", str(tmp_path / "c.json"), "--markdown", str(tmp_path / "c.md")
    )
    assert ended.exit_code == 1 and "regressed" in ended.output and "drift" in ended.output
    assert json.loads((tmp_path / "c.json").read_text())["regressed"] is True
    assert "| regressed |" in (tmp_path / "c.md").read_text()
    assert nano("after", "before").exit_code == 0
    assert nano("before", "before").exit_code == 0
    assert nano("quick", "bbbb").exit_code == 1
    assert nano("before", str(tmp_path / "results.sqlite")).exit_code == 1
    assert nano("before", "after", "--threshold", "30%").exit_code == 0


def test_a_block_is_told_by_its_median_and_one_that_is_not_whole_is_left_out():
    blocks = [[1, 2, 9], [3, 4, 50], [5, 6, 70], [8, 8]]
    row = {
        "details": {"calls_per_block": 3, "warmup_cut": 3},
        "samples": [call for block in blocks for call in block],
    }
    assert list(block_medians(row)) == [4, 6]


def test_the_worst_comes_first(found):
    base = {name: _case(at) for at, name in enumerate("abcd")}
    current = {
        "a": _case(11, level=14),
        "b": _case(12, level=20, memory=16.0),
        "c": _case(2, status=Status.OOM),
        "e": _case(13),
    }
    lines = found(base, current).lines
    told = [(line.finding, line.case[0]) for line in lines if line.finding != "equivalent"]
    assert told == [
        ("regressed", "b"),
        ("regressed", "b"),
        ("regressed", "a"),
        ("failed", "c"),
        ("missing", "d"),
        ("new", "e"),
    ]
