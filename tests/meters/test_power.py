"""Energy of windows, from sources that are recorded traces, counters or estimates."""

import math
import time
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest

from nanolib.measurement import BadInput, Provenance, Status
from nanolib.meters import energy, integration, power
from nanolib.meters.energy import EnergyMeter, Track, Window
from nanolib.meters.integration import ReplaySource
from nanolib.meters.power import EstimateSource, Reading
from nanolib.meters.recording import Trace


class _Steady:
    """A source that reads 50 W at all times."""

    name, of, provenance, period_s = "test", "bench", Provenance.MEASURED, 0.001

    def read(self):
        return Reading(time.monotonic(), watts=50.0)


def test_a_window_begins_and_ends_when_its_device_has_done_what_was_queued(monkeypatch):
    order = []
    monkeypatch.setattr(energy, "synchronizer", lambda device: lambda: order.append(device))
    monkeypatch.setattr(energy, "Window", lambda *values: order.append("begins") or Window(*values))
    with EnergyMeter([_Steady()], sample_s=0.002, device="cuda:1") as meter:
        with pytest.raises(KeyboardInterrupt), meter.window("work") as work:
            order.append("works")
            raise KeyboardInterrupt
        meter.idle(0.001)
    assert work.end_s >= work.start_s
    assert order == ["cuda:1", "begins", "works", "cuda:1", "cuda:1", "begins", "cuda:1"]


def test_windows_nest_and_may_have_one_name():
    with EnergyMeter([_Steady()], sample_s=0.002) as meter, meter.window("outer") as outer:
        with meter.window("inner") as first:
            pass
        with meter.window("inner") as again:
            time.sleep(0.03)
    assert outer.start_s <= first.end_s <= again.start_s < again.end_s <= outer.end_s
    for window in (outer, again):
        joules, *_ = meter.measurements(window)
        assert joules.estimate == pytest.approx(50 * window.seconds, rel=1e-6)


def test_a_recorded_trace_goes_through_the_same_code(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(integration.time, "monotonic", lambda: now[0])
    source = ReplaySource([0, 10, 10.001, 20], [100, 100, 300, 300])
    track = Track(source)
    for now[0] in np.arange(0, 20.5, 0.5):
        track.readings.append(source.read())
    assert track.energy(Window("all", 0, 20)).estimate == pytest.approx(4000, rel=0.02)
    now[0] = 30.0
    assert math.isnan(source.read().watts) and source.period_s == pytest.approx(9.999)


def test_the_estimate_is_between_all_idle_and_all_at_work(monkeypatch):
    Times = namedtuple("Times", "user idle iowait guest")
    now = Times(100.0, 50.0, 10.0, 5.0)
    monkeypatch.setattr(power.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(power.psutil, "cpu_times", lambda: now)
    monkeypatch.setattr(power.time, "sleep", lambda _: None)
    source = EstimateSource()
    assert math.isnan(source.read().watts)  # no time has passed
    now = Times(100.0, 50.3, 10.5, 5.0)
    idle = source.read()
    now = Times(100.1, 50.4, 10.5, 5.1)
    assert source.read()[1:] == idle[1:]  # less than half a period of eight cores
    now = Times(100.4, 50.6, 10.6, 5.4)
    half = source.read()
    assert (idle.low, idle.high) == pytest.approx((1 + 0.8, 60 + 24))
    assert (half.low, half.high) == pytest.approx((1.8 + 4, 84 + 100))
    assert half.watts == pytest.approx(math.sqrt(half.low * half.high)) and math.isnan(half.joules)
    assert idle.t_s <= half.t_s <= time.monotonic()


def _metered(readings, **source):
    """A meter whose only source has these readings, one per second."""
    named = {"name": "test", "of": "gpu 0", "period_s": 0.1, "provenance": Provenance.MEASURED}
    meter = EnergyMeter([SimpleNamespace(**named | source)])
    meter.tracks[0].readings = [Reading(float(t), **one) for t, one in enumerate(readings)]
    return meter


def _counted(*joules):
    return [{"joules": float(value)} for value in joules]


def test_the_rows_of_a_window_are_its_joules_in_four_ways():
    meter = _metered(_counted(0, 2, 4, 6, 8, 10, 30, 50, 70, 90))
    idle, work = Window("idle", 0.0, 4.0), Window("decode", 5.0, 7.0)
    rows = {row.metric: row for row in meter.measurements(work, idle=idle, tokens=4)}
    assert {name: (row.low, row.estimate, row.high) for name, row in rows.items()} == {
        "energy": (18.0, 40.0, 62.0),
        "power": (9.0, 20.0, 31.0),
        "energy_per_token": (4.5, 10.0, 15.5),
        # 4, 8 and 12 J in 4 s of idling are half of that in the window's 2 s
        "net_energy": (12.0, 36.0, 60.0),
    }
    joules = rows["energy"]
    assert (joules.scope, joules.method, joules.message) == ("decode", "test", "")
    assert joules.details == {"of": "gpu 0", "seconds": 2.0, "period_s": 0.1}
    trace = {"course_s": [1.0, 2.0], "course_w": [20.0, 20.0]}
    assert rows["power"].details == joules.details | trace
    alone = [row.metric for row in meter.measurements(work)]
    assert alone == ["energy", "power"]


def test_ten_updates_are_enough_and_the_line_says_how_long_that_takes():
    (track,) = _metered([{"watts": 5.0}] * 9, name="nvml_power", period_s=0.2).tracks
    assert track.energy(Window("w", 0.0, 2.0), 10).estimate == 10
    with pytest.raises(BadInput) as told:
        track.energy(Window("w", 0.0, 0.5), 10)
    assert str(told.value) == (
        "w took 0.5 s, and nvml_power changes every 0.2 s: a window must contain 10 updates; "
        "repeat the work for 2 s"
    )


def test_an_estimates_ends_are_those_of_its_power():
    estimated = {"watts": 20.0, "low": 10.0, "high": 50.0}
    meter = _metered([estimated] * 5, provenance=Provenance.ESTIMATED)
    window = Window("w", 0.0, 4.0)
    joules, *rest = meter.measurements(window, idle=window)
    assert (joules.low, joules.estimate, joules.high) == (40.0, 80.0, 200.0)
    assert joules.message == "estimated from the utilization of the cores: a range, not a reading"
    assert "net_energy" not in {row.metric for row in rest}


@pytest.mark.parametrize(
    ("watts", "said"),
    [
        (0.0, "test of gpu 0 read 0 W, so the readings are not valid; replay another recording"),
        (math.nan, "power_w: 0 sample(s) are not NaN"),
    ],
)
def test_no_power_is_no_reading(watts, said):
    meter = _metered([{"watts": watts}] * 9)
    idle, work = Window("idle", 0.0, 4.0), Window("work", 4.0, 8.0)
    (row,) = meter.measurements(work, idle=idle, tokens=5)
    assert (row.metric, row.status, row.estimate) == ("energy", Status.UNSUPPORTED, None)
    assert row.message.startswith(said)


def test_power_of_zero_in_between_is_a_gap_and_is_not_drawn():
    meter = _metered([{"watts": float(watts)} for watts in (60, 60, 60, 0, 0, 40, 40, 40)])
    joules, power = meter.measurements(Window("w", 0.0, 7.0))
    assert (joules.low, joules.estimate, joules.high) == pytest.approx((320, 350, 380))
    assert power.details["course_w"] == [60.0, 60, 60, 40, 40, 40]


@pytest.mark.parametrize(("still", "valid"), [(4, True), (5, False)])
def test_a_counter_that_stands_still_for_five_of_its_updates_is_not_valid(still, valid):
    joules = [0, 10, *[20] * (still + 1), 30, 40, 50, 60]  # one reading a second
    meter = _metered(_counted(*joules), period_s=0.1)
    found, *_ = meter.measurements(Window("w", 1.0, still + 5.0))
    assert (found.status is Status.OK) == valid
    assert valid or f"did not change in 5 of {still + 4} s" in found.message


def test_a_long_trace_has_sixty_points_or_less():
    """Of a counter that is read four times per change, and of a sensor of power."""
    counter = _metered(_counted(*(10 * (at // 4) for at in range(401))))
    sensor = _metered([{"watts": 2.5}] * 401)
    for meter, points in ((counter, 50), (sensor, 58)):
        course = meter.tracks[0].power_trace(Window("w", 0.0, 400.0))
        assert course["course_w"] == [2.5] * points == [2.5] * len(course["course_s"])


def test_samples_and_sections_go_to_the_trace_in_microseconds_and_nanoseconds(monkeypatch):
    now = [2.0]
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=None))
    source = SimpleNamespace(name="rapl", of="package-0", period_s=0.001)
    source.read = lambda: Reading(now[0], watts=5.0)
    meter = EnergyMeter([source])
    meter.trace = Trace(start_s=1.5)
    with meter.window("decode"):
        now[0] = 2.25
        meter.read()
    ((name, *sample),), sections = meter.trace.rows.values()
    assert (name, *sample[:2]) == ("rapl package-0", 750_000, 5.0)
    assert sections == [("decode", 500_000, 250_000_000)]


def test_leaving_a_window_waits_until_a_counter_tells_its_end(monkeypatch):
    now, meter = [0.0], _metered([])

    def read():
        now[0] += 0.0625
        return Reading(now[0], joules=10 * now[0])

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: meter.read())
    monkeypatch.setattr(energy, "time", clock)
    meter.tracks[0].source.read = read
    meter.read()
    with meter.window("w") as window:
        now[0] += 2.0
    assert window.end_s + 0.1 <= now[0] < window.end_s + 0.2  # its state may be 0.1 s old
