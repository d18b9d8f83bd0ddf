"""Readings and estimates of energy are never drawn nor told alike, and advice goes no further than what layers took."""

from dataclasses import replace

import pandas as pd
import pytest

from nanolib.experiments.energy.tables import energy_table
from nanolib.measurement import Measurement, Provenance, Status
from tests.report.cases import DECODE, layer_case
from tests.report.rows import interval
from tests.shown import CHARTS, VERDICTS


def _case(provenance, method, spread):
    def row(metric, value, scope="decode"):
        rest = {"provenance": provenance, "method": method, "scope": scope, "details": {"of": "x"}}
        return interval(metric, value / spread, value, value * spread, **rest)

    found = [Measurement("tokens_per_second", 100.0, scope="decode", method="window")]
    found += [row("energy", 50.0), row("power", 25.0), row("power", 10.0, "idle")]
    return DECODE, [*found, row("energy_per_token", 0.25), row("net_energy", 30.0)]


def test_each_source_of_energy_has_a_line(measured):
    factors, found = _case(Provenance.MEASURED, "rapl", 1.25)
    memory = {"scope": "decode", "method": "rapl_dram", "details": {"of": "dram"}}
    rows = measured("energy", [(factors, [*found, interval("energy", 5, 7, 9, **memory)])])
    package, dram = energy_table(rows).to_dict("records")
    assert (package["of"], dram["of"], dram["energy"]) == ("x", "dram", 7)
    assert pd.isna(dram["power"]) and pd.isna(dram["net"])
    found = [package[name] for name in ("energy", "power", "power_high", "idle_power", "net")]
    assert found == pytest.approx([50, 25, 31.25, 10, 30])


@pytest.mark.parametrize(
    ("source", "sentences"),
    [
        (
            (Provenance.MEASURED, "rapl", 1.1),
            ["A token uses 250 mJ [227 … 275] at 25 W (decode) according to rapl."],
        ),
        (
            (Provenance.ESTIMATED, "utilisation", 6),
            [
                "A token uses 41.7 to 1,500 mJ (decode) according to an estimate from CPU utilization.",
                "This machine's power was not measured: no power sensor was found, and estimated "
                "ranges allow no comparison. Next: run nano doctor to list the supported sensors.",
            ],
        ),
    ],
)
def test_a_reading_is_a_point_with_its_range_and_an_estimate_a_hollow_range(
    measured, source, sentences
):
    rows = measured("energy", [_case(*source)])
    said = [line.removeprefix("tiny, 64 tokens: ") for line in VERDICTS["energy"](rows)]
    assert said == sentences
    chart, is_hollow = CHARTS["energy_per_token"](rows).to_json(), Provenance.ESTIMATED in source
    assert ("Hollow: a range estimated" in chart) == ('"sure": false' in chart) == is_hollow
    assert ('"sure": true' in chart) == (not is_hollow)
    power = CHARTS["power_over_time"](rows).to_json()
    assert "no sensor measured this machine's power" in power


def _course(scope, watts, provenance, details):
    rest = {"provenance": provenance, "method": "replay", "scope": scope, "details": details}
    return interval("power", watts - 1, watts, watts + 1, **rest)


@pytest.mark.parametrize(
    ("provenance", "subtitle"),
    [
        (Provenance.MEASURED, ["Measured by a sensor."]),
        (
            Provenance.REPLAYED,
            ["Hollow: replayed from a recording, not a reading of this machine."],
        ),
    ],
)
def test_the_idle_time_lies_before_the_work_in_the_course_of_power(measured, provenance, subtitle):
    found = [
        _course(scope, 10.0, provenance, {"course_s": [0.5, 1.5, 2.0], "course_w": [3.0, 4.0, 5.0]})
        for scope in ("idle", "decode")
    ]
    found.append(_course("prefill", 10.0, provenance, {}))
    rows = measured("energy", [(DECODE, found)])
    spec = CHARTS["power_over_time"](rows).to_dict()
    points = [row for data in spec["datasets"].values() for row in data if "series" in row]
    assert {(row["series"], row["x"]) for row in points} == {
        *(("idle", at) for at in (-1.5, -0.5, 0.0)),
        *(("decode", at) for at in (0.5, 1.5, 2.0)),
    }
    assert spec["title"]["subtitle"] == subtitle
    assert {row["sure"] for row in points} == {provenance is Provenance.MEASURED}


def test_a_token_of_more_than_a_joule_is_told_in_joules_and_a_recording_as_one(measured):
    factors, found = _case(Provenance.REPLAYED, "replay", 1.1)
    found[-2] = replace(found[-2], estimate=2.0, low=1.9, high=2.1)
    rows = measured("energy", [(factors, found)])
    (line,) = VERDICTS["energy"](rows)
    said = "A token uses 2.00 J [1.90 … 2.10] at 25 W (decode) in a replayed trace."
    assert line == f"tiny, 64 tokens: {said}"
    chart = CHARTS["energy_per_token"](rows).to_json()
    assert "Hollow: replayed" in chart and "No power sensor" not in chart


def test_the_overhead_of_each_mode_is_told_in_per_cent_and_the_second_baseline_is_none(say):
    ends = {"again": (-0.01, 0.0, 0.01), "minimal": (-0.01, 0.01, 0.03), "deep": (0.04, 0.05, 0.06)}
    details = {"cpu": [0.01, 0.02, 0.03]}
    found = [
        interval("overhead", *each, scope=f"decode {mode}", details=details)
        for mode, each in ends.items()
    ]
    lines = say("energy", [(DECODE, found)])
    costs = "1.00% [-1.00 … 3.00] (no clear difference) in mode minimal, 5.00% [4.00 … 6.00] in mode deep"
    assert any(line.endswith(f"The profiling overhead is {costs}.") for line in lines), lines


def test_a_window_that_was_too_short_says_so(say):
    short = {"status": Status.UNSUPPORTED, "message": "repeat the work", "method": "nvml_power"}
    lines = say("energy", [(DECODE, [Measurement("energy", scope="decode", **short)])])
    assert lines == ["tiny, 64 tokens: The energy of decode was not measured: repeat the work."]


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (60, "Most of the time is spent in gaps between operations (60%), gate (20%) and up (15%): faster kernels can "
             "shorten less than half of the time. Next: increase batch_size to reduce the share of gaps."),

        (50, "Most of the time is spent in gaps between operations (50%), gate (25%) and up (19%). "
             "Next: increase batch_size to reduce the share of gaps."),

        (20, "Most of the time is spent in gate (40%), up (30%) and gaps between operations (20%)."),
    ],
)  # fmt: skip
def test_advice_on_what_lies_between_operations_goes_no_further_than_its_share(say, between, said):
    rest = 100 - between
    operations = {"between": between, "gate": rest / 2, "up": rest * 3 / 8, "down": rest / 8}
    assert f"decode, 64 tokens: {said}" in say("energy", [layer_case(operations)])
