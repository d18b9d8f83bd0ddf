import itertools
from dataclasses import replace

import numpy as np
import pytest

from nanolib.compare.history import KEY, repeats
from nanolib.compare.runs import block_medians, compare_rows
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.meters.latency import compile_row, summarize
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
    assert table[table["metric"] == "peak_memory forward, MiB"].iloc[0].to_dict() == {
        "verdict": "regressed", "experiment": "attention", "case": "a seq_len=8",
        "metric": "peak_memory forward, MiB", "base": "8", "current": "10", "change": "+25.00%",
        "note": "",
    }  # fmt: skip


def test_the_newest_run_of_a_case_counts_on_either_side_also_if_it_failed(found):
    base, current = ([{"a": measured(1, level)} for level in side] for side in ((30, 10), (5, 12)))
    assert _lines(found(base, current))["a", "latency"].verdict.ratio == pytest.approx(1.2)
    comparison = found(base, [*current, {"a": failed()}])
    assert comparison.counts == {"failed": 1} and not comparison.has_regressed


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
    [
        (8.0, 8.5, "regressed"),
        (8.0, 8.375, "changed"),  # at the threshold
        (8.0, 8.0, "equivalent"),
        (8.0, 7.5, "improved"),
        (0.0, 1.0, "regressed"),
    ],
)
def test_memory_has_a_threshold_flops_have_none_and_no_figure_is_no_change(
    found, before, after, finding
):
    nothing = exact("flops", float("nan"), scope="backward")
    compiled = compile_row(2.0, 1.0)  # one time, without blocks
    base = {"a": [*measured(1, memory=before), nothing, compiled]}
    current = {"a": [*measured(1, memory=after, flops=100 + 1e-9), nothing, compiled]}
    comparison = found(base, current, threshold=3 / 64)
    lines = _lines(comparison)
    memory = lines["a", "peak_memory"]
    assert memory.finding == finding and (memory.change == "—") == (before == 0)
    assert lines["a", "flops"].finding == "changed" and len(comparison.lines) == 3
    assert comparison.has_regressed == (finding == "regressed")


@pytest.mark.parametrize("side", [0, 1])
def test_a_timing_needs_a_steady_state_and_valid_samples_on_both_sides(found, side):
    """The others get their verdict all the same."""
    sides = [{name: measured(at + 2 * n) for n, name in enumerate("abcde")} for at in (1, 11)]
    unsteady, bare, zero = (sides[side][name] for name in "abc")
    zero[1] = replace(zero[1], samples=(0.0, *zero[1].samples[1:]))
    unsteady[1] = replace(unsteady[1], flags=(Flag.NO_STEADY_STATE,))
    bare[1] = replace(bare[1], samples=())
    sides[side]["d"] = measured(2, blocks=4)
    sides[1]["e"] = measured(7, 20)
    lines = _lines(found(*sides))
    *without, slow = (lines[name, "latency"] for name in "abcde")
    assert [line.finding for line in without] == ["inconclusive"] * 4
    assert slow.finding == "regressed"
    unsteady, bare, zero, short = (line.message for line in without)
    assert "no steady state in one run" in unsteady
    which = "current" if side else "base"
    assert short == f"{which}: 4 blocks are too few to compare; take at least 6"
    assert bare == f"{which}: 0 blocks are too few to compare; take at least 6"
    assert zero.startswith(f"{which}: each value must be greater than 0")
