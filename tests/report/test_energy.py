"""Readings and estimates of energy are never drawn nor told alike."""

import pytest

from nanolib.experiments.energy.view import energy_table
from nanolib.measurement import Measurement, Provenance, Status
from tests.report.cases import DECODE
from tests.report.rows import interval, points
from tests.shown import CHARTS, VERDICTS


def _case(provenance, method, spread, joules=0.25):
    def row(metric, value, scope="decode"):
        rest = {"provenance": provenance, "method": method, "scope": scope, "details": {"of": "x"}}
        return interval(metric, value / spread, value, value * spread, **rest)

    found = [Measurement("tokens_per_second", 100.0, scope="decode", method="window")]
    found += [row("energy", 50.0), row("power", 25.0), row("power", 10.0, "idle")]
    return DECODE, [*found, row("energy_per_token", joules), row("net_energy", 30.0)]


def test_each_source_of_energy_has_a_line(measured):
    factors, found = _case(Provenance.MEASURED, "rapl", 1.25)
    memory = {"scope": "decode", "method": "rapl_dram", "details": {"of": "dram"}}
    rows = measured("energy", [(factors, [*found, interval("energy", 5, 7, 9, **memory)])])
    table = energy_table(rows).set_index("of")
    columns = ["energy", "power", "power_high", "idle_power", "net"]
    assert table.loc["x", columns].tolist() == pytest.approx([50, 25, 31.25, 10, 30])
    assert table.loc["dram", columns].dropna().to_dict() == {"energy": 7}


@pytest.mark.parametrize(
    ("source", "sentences", "hollow"),
    [
        (
            (Provenance.MEASURED, "rapl", 1.1),
            ["A token uses 250 mJ [227 … 275] at 25.0 W [22.7 … 27.5] (decode) according to rapl."],
            "",
        ),
        (
            (Provenance.REPLAYED, "replay", 1.1, 2.0),
            [
                "A token uses 2.00 J [1.82 … 2.20] at 25.0 W [22.7 … 27.5] (decode) in a replayed "
                "trace."
            ],
            "Hollow: replayed",
        ),
        (
            (Provenance.ESTIMATED, "utilisation", 6),
            [
                "A token uses 41.7 to 1,500 mJ (decode) according to an estimate from CPU "
                "utilization.",
                "This machine's power was not measured: no power sensor was found, and estimated "
                "ranges allow no comparison. Next: run nano doctor to list the supported sensors.",
            ],
            "Hollow: a range estimated",
        ),
    ],
)
def test_a_reading_is_a_point_with_its_range_and_an_estimate_a_hollow_range(
    measured, source, sentences, hollow
):
    rows = measured("energy", [_case(*source)])
    said = [line.removeprefix("tiny, 64 tokens: ") for line in VERDICTS["energy"](rows)]
    assert said == sentences
    chart = CHARTS["energy_per_token"](rows)
    notes = [line for line in chart.title.subtitle if "Hollow" in line]
    assert len(notes) == bool(hollow) and hollow in "".join(notes)
    assert points(chart, "sure") == [(not hollow,)]
    power = CHARTS["power_over_time"](rows).to_json()
    assert "no sensor measured this machine's power" in power


def test_the_overhead_of_each_mode_is_told_in_per_cent_and_the_second_baseline_is_none(say):
    ends = {"again": (-0.01, 0.0, 0.01), "minimal": (-0.01, 0.01, 0.03), "deep": (0.04, 0.05, 0.06)}
    details = {"cpu": [0.01, 0.02, 0.03]}
    found = [
        interval("overhead", *each, scope=f"decode {mode}", details=details)
        for mode, each in ends.items()
    ]
    lines = say("energy", [(DECODE, found)])
    minimal, deep = "1.00% [-1.00 … 3.00] (no clear difference)", "5.00% [4.00 … 6.00]"
    costs = f"The profiling overhead is {minimal} in mode minimal, {deep} in mode deep."
    assert any(line.endswith(costs) for line in lines), lines


def test_a_window_that_was_too_short_says_so(say):
    short = {"status": Status.UNSUPPORTED, "message": "repeat the work"}
    lines = say("energy", [(DECODE, [Measurement("energy", scope="decode", **short)])])
    assert lines == ["tiny, 64 tokens: The energy of decode was not measured: repeat the work."]
