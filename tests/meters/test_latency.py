import gc

import numpy as np
import pytest

from nanolib.measurement import BadInput, Flag
from nanolib.meters import latency
from nanolib.meters.latency import measure, measure_phases, summarise
from nanolib.stats.intervals import median_interval


class FakeClock:
    """Hands out a series of milliseconds in place of time; after its end the last value repeats."""

    method = "fake"

    def __init__(self, series, resolution=1e-6):
        self.series, self.at, self.resolution = list(series), 0, resolution

    def time_block(self, phases, calls, inner):
        rows = []
        for _ in range(calls):
            for phase in phases:
                phase()
            rows.append([self._next() for _ in phases])
        return rows

    def _next(self):
        value = self.series[min(self.at, len(self.series) - 1)]
        self.at += 1
        return value

    def resolution_ms(self):
        return self.resolution


@pytest.fixture
def clocked(monkeypatch):
    def use(series, **rest):
        clock = FakeClock(series, **rest)
        monkeypatch.setattr(latency, "clock_for", lambda device: clock)
        return clock

    return use


def _noisy(n, level=100.0, cv=0.001, seed=0):
    return level * (1 + cv * np.random.default_rng(seed).normal(size=n))


def test_it_stops_at_the_precision_asked_for(clocked):
    clocked(_noisy(500))
    row = measure(lambda: None, precision=0.01)
    assert row.details["stop"] == "precision" and row.n >= 20 and row.half_width <= 0.01
    assert row.estimate == pytest.approx(100, rel=0.002)


def test_it_stops_at_a_hundred_blocks_when_precision_is_out_of_reach(clocked):
    clocked(_noisy(500, cv=0.3))
    row = measure(lambda: None, precision=0.001)
    assert row.details["stop"] == "max_blocks" and row.n + row.details["warmup_cut"] == 100


def test_it_stops_at_the_budget_but_not_before_three_blocks(clocked):
    clocked(_noisy(500))
    row = measure(lambda: None, budget_s=1e-9)
    assert row.details["stop"] == "budget" and row.n == 3
    assert row.confidence == 0.75 and (row.low, row.high) == (min(row.samples), max(row.samples))
    assert Flag.FEW_BLOCKS in row.flags


def test_estimate_and_interval_are_those_of_block_medians(clocked):
    clocked(_noisy(5000, level=1.0, cv=0.02))
    row = measure(lambda: None, precision=0.5)
    per_block = row.details["calls_per_block"]
    assert per_block in (5, 6)  # blocks of at least 5 ms out of calls of about 1 ms
    medians = np.median(np.reshape(row.samples, (-1, per_block)), axis=1)
    assert (row.low, row.estimate, row.high) == tuple(median_interval(medians))
    assert row.n == len(medians)


def test_a_warm_up_is_found_and_cut_and_its_samples_are_kept(clocked):
    series = _noisy(500)
    series[:10] *= 2
    clocked(series)
    row = measure(lambda: None)
    assert row.details["warmup_cut"] == 10 and len(row.samples) == row.n + 10
    assert row.estimate == pytest.approx(100, rel=0.002)


def test_a_single_cold_call_is_cut(clocked):
    series = _noisy(500)
    series[0] = 400
    clocked(series)
    assert measure(lambda: None).details["warmup_cut"] == 1


def test_outliers_are_labelled_and_kept(clocked):
    series = _noisy(500)
    series[12] = 900
    clocked(series)
    row = measure(lambda: None)
    assert Flag.OUTLIERS_SEVERE in row.flags and max(row.samples) == 900


def test_removed_outliers_are_told(clocked):
    series = _noisy(500)
    series[12] = 900
    clocked(series)
    row = measure(lambda: None, outliers="remove")
    assert Flag.OUTLIERS_REMOVED in row.flags and "outliers removed" in row.method and 900 in row.samples


def test_a_series_that_keeps_changing_has_no_steady_state(clocked):
    clocked(np.concatenate([_noisy(15), _noisy(200, level=130)]))
    row = measure(lambda: None, precision=0.3)
    assert Flag.SLOWDOWN in row.flags or Flag.NO_STEADY_STATE in row.flags


def test_short_calls_are_timed_many_at_once(clocked):
    calls = []
    clocked([0.001] * 100_000, resolution=1e-4)
    row = measure(lambda: calls.append(1))
    assert row.details["inner"] == 100  # 1000 resolutions of 0.1 µs over calls of 1 µs


def test_phases_are_timed_in_turn_and_summed(clocked):
    clocked([30.0, 60.0, 10.0] * 400)
    order = []
    rows = measure_phases({name: lambda name=name: order.append(name) for name in ("forward", "backward", "step")})
    assert order[:6] == ["forward", "backward", "step"] * 2
    assert [rows[name].estimate for name in ("forward", "backward", "step", "total")] == [30, 60, 10, 100]


def test_details_describe_all_kept_samples():
    x = np.random.default_rng(1).normal(10, 1, 50)
    details = summarise(x).details
    assert details["mean"] == pytest.approx(x.mean()) and details["sd"] == pytest.approx(x.std(ddof=1))
    assert details["cv"] == pytest.approx(x.std(ddof=1) / x.mean())
    assert [details[f"p{p}"] for p in (5, 50, 95, 99)] == pytest.approx(list(np.percentile(x, [5, 50, 95, 99])))


def test_the_collector_is_off_inside_and_as_before_afterwards(clocked):
    clocked([10.0] * 100)
    inside = []
    measure(lambda: inside.append(gc.isenabled()))
    assert not any(inside) and gc.isenabled() and gc.get_freeze_count() == 0


def test_an_error_in_the_call_reaches_the_caller_and_restores_the_collector():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0)
    assert gc.isenabled()


@pytest.mark.parametrize("name", ["precision", "budget_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "fast"])
def test_a_bad_limit_is_told(name, value):
    with pytest.raises(BadInput, match=f"{name}: .* will not do; give a number above 0"):
        measure(lambda: None, **{name: value})


def test_the_real_clock_gives_positive_samples():
    row = measure(lambda: sum(range(1000)), budget_s=0.2)
    assert min(row.samples) > 0 and row.low <= row.estimate <= row.high and row.method == "perf_counter"
