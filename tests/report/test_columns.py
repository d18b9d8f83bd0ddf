"""Tables: which baseline a ratio has, what is compared within a process."""

import itertools

import pandas as pd
import pytest

from nanolib.experiments.attention.tables import attention_table
from nanolib.experiments.energy.tables import energy_table
from nanolib.experiments.warmup import view as warmup_view
from nanolib.measurement import Measurement, exact
from nanolib.report import tables
from tests.report.rows import SIZES, ended, interval, warmup_process


def _attention_case(name, ends, *more, tiles=0.0, ending=None, **shape):
    found = [ending or ended(), interval("latency", *ends, scope="forward", predicted=ends[1] / 4)]
    found.append(exact("block_sparsity", tiles, method="mask"))
    return SIZES | {"causal": True, "options": {}, "name": name} | shape, [*found, *more]


def test_the_baseline_is_of_the_same_run_and_shape(measured):
    shapes = (
        {},
        {"seq_len": 128},
        {"batch_size": 5},
        {"dtype": "bfloat16"},
        {"causal": False},
        {"device": "cuda:0"},
    )
    times = itertools.count(10)
    cases = [[_attention_case(name, (at - 1, at, at + 1), **shape) for shape in shapes for name, at in
              (("dense (math)", next(times)), ("dense (flash)", next(times)), ("a", 10))] for _ in range(2)]  # fmt: skip
    table = attention_table(measured("attention", *cases))
    sparse = table[table["name"] == "a"]
    assert list(sparse["speed_up"]) == pytest.approx([at / 10 for at in range(10, 33, 2)])
    assert set(sparse["speed_up_baseline"]) == {"dense (math)"}  # the faster of the two


def test_the_warm_up_table_compares_means_within_each_process(measured):
    def cases(direction, *processes):
        found = (warmup_process(direction, at, 10, times) for at, times in enumerate(processes, 1))
        return [(factors, [ended(), *rows]) for factors, rows in found]

    forward = cases(
        "forward",
        {5: (10, 20), 0: (15, 50)},
        {5: (11, 30), 0: (18, 60)},
        {5: (12, 10), 0: (14, 40)},
    )
    backward = cases("backward", {2: (7, 30), 5: (8, 40)})
    other = cases("forward", {3: (7, 5)})
    table = warmup_view.warmup_table(measured("warmup", [*forward, *backward], other))
    assert list(table["warmup_steps"]) == [5, 0, 2, 5, 3] and list(table["processes"]) == [
        3,
        3,
        1,
        1,
        1,
    ]
    assert list(table["difference"][:4]) == pytest.approx([0, 1.5, -0.25, 0]) and pd.isna(
        table["difference"][4]
    )
    cold = table.iloc[1]
    numbers = {
        "median": 15,
        "median_low": 14,
        "median_high": 18,
        "mean": 50,
        "mean_low": 40,
        "mean_high": 60,
        "sd": 3,
        "cv": 0.33,
    }
    assert {name: cold[name] for name in numbers} == pytest.approx(numbers)
    assert (cold["difference_low"], cold["difference_high"]) == pytest.approx((1, 3))


def test_cells_are_for_people():
    table = pd.DataFrame(
        {"a": [12.0, float("nan")], "a_low": [11.0, 1.0], "a_high": [15.0, 2.0], "flags": [["x", "y"], []],
         "b": [True, None], "c": [0.5, 2.0], "c_low": [0.25, 1.0], "hidden": [1, 2]}
    )  # fmt: skip
    shown = tables.readable(table, {"c": "C", "a": "A [95 %]", "flags": "F", "b": "B", "none": "N"})
    assert list(shown.columns) == ["C", "A [95 %]", "F", "B"]
    assert shown.to_numpy().tolist() == [
        ["0.5000", "12.0 [11.0 … 15.0]", "x, y", "True"],
        ["2", "—", "", ""],
    ]


def test_each_source_of_energy_has_a_line(measured):
    def row(metric, low, value, high, scope="decode", **rest):
        return Measurement(
            metric,
            value,
            low,
            high,
            1.0,
            1,
            method="rapl",
            scope=scope,
            details={"of": "package"},
            **rest,
        )

    factors = SIZES | {"name": "tiny", "phase": "decode"}
    found = [ended(), Measurement("tokens_per_second", 75.0, scope="decode", method="window")]
    found += [row("energy", 36, 40, 50), row("power", 18, 20, 25), row("power", 6, 8, 9, "idle")]
    found += [
        row("energy_per_token", 0.18, 0.2, 0.25),
        row("energy_delay", 70, 80, 100),
        row("net_energy", 12, 24, 30),
    ]
    other = Measurement(
        "energy", 7.0, 5.0, 9.0, 1.0, 1, method="rapl_dram", scope="decode", details={"of": "dram"}
    )
    package, dram = energy_table(measured("energy", [(factors, [*found, other])])).to_dict(
        "records"
    )
    numbers = {
        "energy": 40, "energy_low": 36, "energy_high": 50, "power": 20, "power_low": 18, "power_high": 25,
        "idle_power": 8, "idle_power_low": 6, "idle_power_high": 9, "energy_per_token": 0.2, "energy_delay": 80,
        "net": 24, "net_low": 12, "net_high": 30, "tokens_per_second": 75,
    }  # fmt: skip
    assert {name: package[name] for name in numbers} == pytest.approx(numbers)
    assert (package["of"], dram["of"], dram["energy"], package["batch_size"]) == (
        "package",
        "dram",
        7,
        3,
    )
    assert pd.isna(dram["power"]) and pd.isna(dram["net"])


def test_a_curve_is_warm_up_as_far_as_it_was_needed(measured):
    cases = []
    for direction, needed in (("a", 1.0), ("b", None), ("c", 0.0)):
        factors, rows = warmup_process(direction, 1, 10, {0: (9, 9)}, needed)
        cases.append((factors, [ended(), *rows]))
    table = warmup_view.curve_table(measured("warmup", cases))
    assert list(table["phase"]) == [
        "warm-up",
        *["steady"] * 3,
        *["not settled"] * 4,
        *["steady"] * 4,
    ]
    assert list(table["ms"]) == [30, 20, 10, 10] * 3
