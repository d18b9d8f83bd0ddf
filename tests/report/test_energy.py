"""Readings and estimates of energy are never drawn nor told alike, and advice goes no further than what layers took."""

import json

import pandas as pd
import pytest

from nanolib.experiments.energy.view import energy_table
from nanolib.measurement import Measurement, Provenance, Status
from tests.report.cases import DECODE, layer_case
from tests.report.rows import interval
from tests.shown import CHARTS, VERDICTS


def _case(provenance, method, spread):
    def row(metric, value, scope="decode"):
        rest = {"provenance": provenance, "method": method, "scope": scope, "details": {"of": "x"}}
        return interval(metric, value / spread, value, value * spread, **rest)

    found = [Measurement("tokens_per_second", 100.0, scope="decode", method="window")]
    found += [
        row("energy", 50.0),
        row("power", 25.0),
        row("energy_per_token", 0.25),
        row("energy_delay", 80.0),
    ]
    return DECODE | {"device": "cpu"}, [*found, row("net_energy", 30.0), row("power", 10.0, "idle")]


def _sure(rows):
    spec = CHARTS["energy_per_token"](rows).to_dict()
    return {row["sure"] for data in spec["datasets"].values() for row in data if "sure" in row}


def test_each_source_of_energy_has_a_line(measured):
    factors, found = _case(Provenance.MEASURED, "rapl", 1.25)
    memory = {"scope": "decode", "method": "rapl_dram", "details": {"of": "dram"}}
    rows = measured("energy", [(factors, [*found, interval("energy", 5, 7, 9, **memory)])])
    package, dram = energy_table(rows).to_dict("records")
    numbers = {
        "energy": 50, "energy_low": 40, "energy_high": 62.5, "power": 25, "power_low": 20, "power_high": 31.25,
        "idle_power": 10, "idle_power_low": 8, "idle_power_high": 12.5, "energy_per_token": 0.25, "energy_delay": 80,
        "net": 30, "net_low": 24, "net_high": 37.5, "tokens_per_second": 100,
    }  # fmt: skip
    assert {name: package[name] for name in numbers} == pytest.approx(numbers)
    assert (package["of"], package["batch_size"]) == ("x", 3)
    assert (dram["of"], dram["energy"]) == ("dram", 7)
    assert pd.isna(dram["power"]) and pd.isna(dram["net"])


def test_a_reading_has_a_point_and_a_range_above_idle(measured):
    rows = measured("energy", [_case(Provenance.MEASURED, "rapl", 1.1)])
    text = "\n".join(VERDICTS["energy"](rows))
    assert "A token uses 250 mJ [227 … 275] at 25 W (decode) according to rapl." in text
    assert "not measured" not in text
    assert _sure(rows) == {True}
    assert "no energy run" in json.dumps(CHARTS["power_over_time"](rows[:0]).to_dict())


def test_an_estimate_is_a_range_and_its_marks_are_hollow(measured):
    rows = measured("energy", [_case(Provenance.ESTIMATED, "utilisation", 6)])
    text = "\n".join(VERDICTS["energy"](rows))
    assert "A token uses an estimated 41.7 to 1,500 mJ (decode) according to utilisation." in text
    assert "This machine's power was not measured: no power sensor was found" in text
    assert _sure(rows) == {False}
    assert "Hollow: a range estimated" in json.dumps(CHARTS["energy_per_token"](rows).to_dict())
    assert "no sensor measured this machine's power" in json.dumps(
        CHARTS["power_over_time"](rows).to_dict()
    )
    assert list(energy_table(rows)["provenance"]) == ["estimated"]


def test_a_window_that_was_too_short_says_so(measured):
    factors, _ = _case(Provenance.MEASURED, "nvml_power", 1.1)
    short = {"status": Status.UNSUPPORTED, "message": "repeat the work", "method": "nvml_power"}
    rows = measured("energy", [(factors, [Measurement("energy", scope="decode", **short)])])
    assert "repeat the work" in "\n".join(VERDICTS["energy"](rows))
    CHARTS["energy_per_token"](rows)


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (60, "Most of the time is spent in gaps between operations (60%), gate (20%) and up (15%): faster kernels can "
             "shorten less than half of the time. Next: increase batch_size to reduce the share of gaps."),

        (20, "Most of the time is spent in gate (40%), up (30%) and gaps between operations (20%)."),
    ],
)  # fmt: skip
def test_advice_on_what_lies_between_operations_goes_no_further_than_its_share(say, between, said):
    rest = 100 - between
    operations = {"between": between, "gate": rest / 2, "up": rest * 3 / 8, "down": rest / 8}
    assert f"decode, 64 tokens: {said}" in say("energy", [layer_case("blocks.0", operations)])
