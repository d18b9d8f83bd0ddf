"""Latency: which blocks are timed, when it stops, and what the row says of them."""

import gc
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from nanolib.measurement import BadInput, Flag
from nanolib.meters import latency, sampler
from nanolib.meters.interference import CpuLoad
from nanolib.meters.latency import measure, measure_phases, summarize
from nanolib.meters.sampler import Timing
from nanolib.stats.changes import SteadyState
from nanolib.stats.intervals import median_interval

STEADY = SteadyState()


def _noisy(n, level=100.0, cv=0.001, seed=0):
    return level * (1 + cv * np.random.default_rng(seed).normal(size=n))


def _nothing():
    pass


def test_estimate_and_interval_are_those_of_block_medians(clocked):
    clocked(_noisy(5000, level=1.0, cv=0.02))
    row = measure(_nothing, rel_ci=0.5)
    per_block = row.details["calls_per_block"]
    assert per_block in (5, 6)  # blocks of at least 5 ms out of calls of about 1 ms
    medians = np.median(np.reshape(row.samples, (-1, per_block)), axis=1)
    assert (row.low, row.estimate, row.high) == tuple(median_interval(medians))


def test_phases_are_timed_in_turn_and_their_sum_must_be_precise(clocked):
    """Their shares of it change from call to call: 18, 22, 60 and 2, 38, 60."""
    clocked([18.0, 22.0, 60.0, 2.0, 38.0, 60.0] * 300)
    order = []
    rows = measure_phases(Timing({name: lambda name=name: order.append(name) for name in "abc"}))
    assert order[:6] == [*"abcabc"]
    found = {name: row.estimate for name, row in rows.items()}
    assert found == {"a": 10, "b": 30, "c": 60, "total": 100} and rows["total"].n == 20
    assert list(measure_phases(Timing({"a": _nothing}, budget_s=1e-9))) == ["a"]


def test_details_describe_all_kept_samples():
    x = np.random.default_rng(1).normal(10, 1, 50)
    details = summarize(x).details
    mean, sd, mad = x.mean(), x.std(ddof=1), np.median(np.abs(x - np.median(x)))
    expected = {"mean": mean, "sd": sd, "cv": sd / mean, "mad": mad}
    expected |= {f"p{p}": np.percentile(x, p) for p in (5, 50, 95, 99)}
    assert {name: details[name] for name in expected} == pytest.approx(expected)


# the rules one by one, at their bounds


@pytest.mark.parametrize(
    ("series", "samples", "per_block"),
    [
        # the first call is cold, the second one sets the size of a block
        ([19.0, 5.0, 7.0], [7.0] * 6, 1),
        ([19.0, 4.9, 7.0], [7.0] * 12, 2),
    ],
)
def test_blocks_last_five_milliseconds_and_cold_calls_are_in_none(
    clocked, series, samples, per_block
):
    clocked(series)
    row = measure(_nothing, budget_s=1e-9)
    assert list(row.samples) == samples
    told = {"calls_per_block": per_block, "inner": 1}
    told |= {"precision": 0.01, "budget_s": 1e-9, "threads": torch.get_num_threads()}
    told["stop"] = "budget"  # but not before six blocks
    assert told.items() <= row.details.items()


def test_a_reading_spans_a_thousand_steps_of_the_clock(clocked):
    clock = clocked([0.3], resolution=1e-3)
    row = measure(_nothing, budget_s=1e-9)
    # 4 · 0.3 ≥ 1 ms, 5 · 1.2 ≥ 5 ms
    assert clock.asked == [(1, 1)] * 2 + [(5, 4)] * 6
    assert (row.details["inner"], row.details["calls_per_block"]) == (4, 5)
    clock = clocked([0.3], resolution=1e-3)
    measure_phases(Timing({"a": _nothing, "b": _nothing}, budget_s=1e-9))
    assert clock.asked[2] == (9, 1)  # phases follow each other


def test_a_precise_series_stops_at_twenty_blocks_and_an_imprecise_one_goes_on(clocked, monkeypatch):
    assert sampler.MAX_BLOCKS == 100
    monkeypatch.setattr(sampler, "MAX_BLOCKS", 30)  # which takes less time
    for rel_ci, n in ((0.06, 30), (0.07, 20)):
        clocked([28.0, 32.0] * 300)  # ± 6.7 % however long it takes
        assert measure(_nothing, rel_ci=rel_ci).n == n


def test_a_warm_up_of_blocks_of_several_calls_is_no_part_of_the_precision(clocked):
    noise = np.random.default_rng(0).normal(0, 0.001, 1000)
    clocked((1 + noise) * np.where(np.arange(1000) < 17, 2.0, 1.0))
    row = measure(_nothing)  # the first two calls are no samples; a block is three calls of 2 ms
    assert (row.details["calls_per_block"], row.details["warmup_cut"]) == (3, 15)
    assert len(row.samples) == 3 * row.n + 15 and row.estimate == pytest.approx(1, rel=0.002)
    assert (row.details["stop"], row.n) == ("precision", 20)


def test_a_warm_up_that_is_no_outlier_is_cut_and_what_never_settles_is_kept_whole():
    row = summarize(_noisy(80, cv=0.05) + 15 * (np.arange(80) < 20))
    assert row.details["warmup_cut"] == 20
    row = summarize(np.concatenate([_noisy(65), _noisy(15, level=130, seed=1)]))
    assert row.n == 80 and row.details["warmup_cut"] == 0
    assert {Flag.NO_STEADY_STATE, Flag.GOT_SLOWER} <= set(row.flags)


@pytest.mark.parametrize(
    ("cut", "taken", "n", "is_flagged"),
    [
        (10, 12, 6, False),  # a cut within a block takes all of it
        (13, 0, 10, True),  # too few blocks for an interval would be left
    ],
)
def test_a_cut_takes_whole_blocks_and_leaves_enough_of_them(cut, taken, n, is_flagged):
    row = summarize(np.arange(1.0, 31), calls_per_block=3, steady=SteadyState(cut=cut))
    assert (row.details["warmup_cut"], row.n, row.confidence) == (taken, n, 0.95)
    assert row.estimate == row.details["mean"] == np.arange(taken + 1, 31).mean()
    assert len(row.samples) == 30 and (Flag.NO_STEADY_STATE in row.flags) == is_flagged


@pytest.mark.parametrize(
    ("series", "flags"),
    [
        ([10.0, 11, 12] * 10, []),
        ([*[10.0, 11, 12] * 10, 16.0], [Flag.OUTLIERS_MILD]),
        ([*[10.0, 11, 12] * 10, 16.0, 30.0], [Flag.OUTLIERS_SEVERE]),
    ],
)
def test_flags_say_what_the_blocks_show(series, flags):
    found = summarize(series, steady=STEADY).flags
    assert [flag for flag in found if flag is not Flag.AUTOCORRELATED] == flags


def test_a_row_says_what_others_did_while_it_was_measured(monkeypatch):
    @contextmanager
    def watched():
        yield CpuLoad(0.2, 0.05, "a CPU quota of 0.5 cores")

    monkeypatch.setattr(latency, "watch_cpus", watched)
    row = measure(_nothing, budget_s=1e-9)
    told = {"others_share": 0.25, "throttled_by": "a CPU quota of 0.5 cores"}
    assert told.items() <= row.details.items()
    assert {Flag.BUSY_MACHINE, Flag.THROTTLED} <= set(row.flags)


@pytest.mark.parametrize(
    ("series", "interval"),
    [
        ([10.0], (None, 10.0, None, None)),
        ([14.0, 10.0, 12.0, 11.0, 13.0], (None, 12.0, None, None)),
        ([1.0, 2, 3, 4, 5, 6], (*median_interval([1, 2, 3, 4, 5, 6]), 0.95)),
    ],
)
def test_five_blocks_have_no_interval(series, interval):
    row = summarize(series, steady=STEADY)
    assert (row.low, row.estimate, row.high, row.confidence) == interval
    assert row.n == len(series) and (row.details["sd"] == 0) == (row.n == 1)
    assert (Flag.LOW_SAMPLE_COUNT in row.flags) == (row.confidence != 0.95)


def test_blocks_that_depend_on_each_other_are_flagged():
    for series, depend in ((10 + np.sin(np.arange(60) / 5), True), (_noisy(60), False)):
        row = summarize(series, steady=STEADY)
        assert (row.details["ljung_box_p"] < 0.01) == depend
        assert (Flag.AUTOCORRELATED in row.flags) == depend


# garbage is collected between blocks, never in one, and the collector is left as it was found


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("slow", [True, False])
def test_the_collector_is_off_inside_and_as_before_after_an_error(
    clocked, monkeypatch, enabled, slow
):
    """Objects are frozen only where a collection is slow."""
    monkeypatch.setattr(sampler, "_SLOW_S", -1.0 if slow else 1e9)
    clocked([10.0] * 100)
    gc.unfreeze()
    inside = []

    def call():
        inside.append((gc.isenabled(), gc.get_freeze_count() > 9_000))
        return 1 / (10 - len(inside))

    try:
        if not enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError):
            measure(call)
        assert {*inside} == {(False, slow)}
        assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, 0)
    finally:
        gc.enable()
        gc.freeze()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rel_ci": math.nan}, "rel_ci: must be above 0, got nan"),
        ({"budget_s": -1}, "budget_s: must be above 0, got -1"),
        ({"device": "tpu"}, "device: 'tpu' is not available; use auto or one of cpu"),
    ],
)
def test_a_value_that_gives_no_measurement_is_named(options, message):
    with pytest.raises(BadInput, match=f"^{message}"):
        measure(lambda: 1, **options)
