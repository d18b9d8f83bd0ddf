"""Tables: which baseline a ratio has, what is compared within a process."""

import itertools
import math

import pandas as pd
import pytest

from nanolib.experiments.attention.findings import attention_table
from nanolib.experiments.energy.view import energy_table
from nanolib.experiments.warmup import view as warmup_view
from nanolib.measurement import Measurement, exact
from nanolib.report import tables
from tests.report.rows import SIZES, interval, warmup_process


def _attention_case(name, ends, **shape):
    found = [interval("latency", *ends, scope="forward", predicted=ends[1] / 4)]
    found.append(exact("block_sparsity", 0.0, method="mask"))
    return SIZES | {"causal": True, "options": {}, "name": name} | shape, found


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
        return [warmup_process(direction, at, 10, times) for at, times in enumerate(processes, 1)]

    each = ((10, 20), (15, 50)), ((11, 30), (18, 60)), ((12, 10), (14, 40))
    forward = cases("forward", *({5: warm, 0: cold} for warm, cold in each))
    backward = cases("backward", {2: (7, 30), 5: (8, 40)})
    other = cases("forward", {3: (7, 5)})
    table = warmup_view.warmup_table(measured("warmup", [*forward, *backward], other))
    assert list(table["warmup_steps"]) == [5, 0, 2, 5, 3]
    assert list(table["processes"]) == [3, 3, 1, 1, 1]
    expected = [0, 1.5, -0.25, 0, math.nan]
    assert list(table["difference"]) == pytest.approx(expected, nan_ok=True)
    cold = table.iloc[1]
    numbers = {
        "median": 15, "median_low": 14, "median_high": 18, "mean": 50, "mean_low": 40, "mean_high": 60, "sd": 3, "cv": 0.33,
    }  # fmt: skip
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
    def row(metric, low, value, high, scope="decode", of="package", method="rapl"):
        rest = {"method": method, "scope": scope, "details": {"of": of}}
        return interval(metric, low, value, high, **rest)

    found = [
        Measurement("tokens_per_second", 75.0, scope="decode", method="window"),
        *(row("energy", 36, 40, 50), row("power", 18, 20, 25), row("power", 6, 8, 9, "idle")),
        *(row("energy_per_token", 0.18, 0.2, 0.25), row("energy_delay", 70, 80, 100)),
        *(row("net_energy", 12, 24, 30), row("energy", 5, 7, 9, of="dram", method="rapl_dram")),
    ]
    rows = measured("energy", [(SIZES | {"name": "tiny", "phase": "decode"}, found)])
    package, dram = energy_table(rows).to_dict("records")
    numbers = {
        "energy": 40, "energy_low": 36, "energy_high": 50, "power": 20, "power_low": 18, "power_high": 25,
        "idle_power": 8, "idle_power_low": 6, "idle_power_high": 9, "energy_per_token": 0.2, "energy_delay": 80,
        "net": 24, "net_low": 12, "net_high": 30, "tokens_per_second": 75,
    }  # fmt: skip
    assert {name: package[name] for name in numbers} == pytest.approx(numbers)
    assert (package["of"], package["batch_size"]) == ("package", 3)
    assert (dram["of"], dram["energy"]) == ("dram", 7)
    assert pd.isna(dram["power"]) and pd.isna(dram["net"])


def test_a_curve_is_warm_up_as_far_as_it_was_needed(measured):
    needed = {"a": 1.0, "b": None, "c": 0.0}
    cases = [warmup_process(name, 1, 10, {0: (9, 9)}, steps) for name, steps in needed.items()]
    table = warmup_view.curve_table(measured("warmup", cases))
    phases = ["warm-up", *["steady"] * 3, *["not settled"] * 4, *["steady"] * 4]
    assert list(table["phase"]) == phases and list(table["ms"]) == [30, 20, 10, 10] * 3
