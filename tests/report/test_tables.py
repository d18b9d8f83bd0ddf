"""Tables: over what a ratio is, where a case under its roof lies, what is counted and what failed."""

import itertools
import math

import pandas as pd
import pytest

from nanolib.experiments.attention.findings import attention_table
from nanolib.experiments.distributed import tables as decode_tables
from nanolib.experiments.fp8 import view as fp8
from nanolib.experiments.warmup import view as warmup_view
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.report import overview, tables
from nanolib.report.charts import roofline_table, roofline_words
from tests.report.cases import CEILINGS, attention_case, fp8_case, inference, rated
from tests.report.rows import SIZES, ended, interval, warmup_process
from tests.shown import CHARTS

PARTS = ("weights", "gradients", "optimizer", "activations")


def test_speed_ups_of_a_precision_are_over_bf16_of_the_same_run_and_shape(measured):
    def case(precision, low, ms, high, **changes):
        factors, (time, _) = fp8_case(700, precision, low, ms, high, **changes)
        parts = (Measurement("memory_part", at, scope=name) for at, name in enumerate(PARTS, 1))
        rates = Measurement("tokens_per_second", 96.0), interval("mfu", 0.1, 0.25, 0.5)
        return factors, [time, *rates, *parts]

    fast = case("fp8_rowwise", 2, 3, 4)
    first = [case("bfloat16", 8, 9, 12), fast, case("fp8_rowwise", 2, 3, 4, batch_size=5)]
    second = [fast, case("bfloat16", 17, 18, 24, compiled=False)]
    rows = measured("fp8", first, second)
    assert "Speed-up over bf16, × [95 %]" in fp8.SECTION.tables["Speed and memory"].readable(rows)
    table = fp8.speed_table(rows)
    assert table["speed_up"].notna().sum() == 1
    numbers = {
        "latency": 3, "latency_low": 2, "latency_high": 4, "speed_up": 3, "speed_up_low": 2, "speed_up_high": 6,
        "tokens_per_second": 96, "mfu": 0.25, "parameters": 700,
    } | {name: at for at, name in enumerate(PARTS, 1)}  # fmt: skip
    assert dict(table.loc[1, list(numbers)]) == pytest.approx(numbers)


def test_efficiency_is_one_ranks_time_over_that_of_all_of_them(measured):
    def case(world, ends, alone=(), **changes):
        found = [
            interval("latency", *ends, scope=scope) for scope, ends in (("ring", ends), *alone)
        ]
        for method, sent in (("formula", 640), ("interface", 700)):
            found.append(exact("wire_bytes", sent, scope="ring", method=method))
        found.append(exact("communication_steps", 3, scope="ring"))
        found.append(exact("relative_error", 1e-7, scope="ring"))
        for kind, ms in zip(decode_tables.KINDS, (2.0, 5.0, 3.0), strict=True):
            part = {"scope": f"ring: {kind}"}
            found.append(interval("component_time", ms - 1, ms, ms + 2, predicted=ms / 4, **part))
        shape = {"seq_len": 4096, "dtype": "float32", "world_size": world}
        return shape | {"algorithms": ["ring", "fused"]} | changes, found

    four = case(4, (5, 6, 8), [("one rank", (15, 18, 24))])
    cases = [four, case(1, (1, 2, 3)), case(4, (5, 6, 8), seq_len=64)]
    table = decode_tables.decode_table(measured("distributed", cases))
    short, alone, line = table.to_dict("records")
    numbers = {
        "efficiency": 0.75, "efficiency_low": 15 / 32, "efficiency_high": 1.2, "latency": 6, "latency_low": 5, "latency_high": 8,
        "compute": 2, "wait": 5, "communication": 3, "communication_low": 2, "communication_high": 5,
        "communication_predicted": 0.75, "communication_steps": 3, "sent": 640, "counted": 700, "relative_error": 1e-7,
    }  # fmt: skip
    assert {name: line[name] for name in numbers} == pytest.approx(numbers)
    assert (line["binds"], line["ranks"], line["world_size"]) == ("unclear", "4", 4)
    shown = tables.readable(pd.DataFrame([line]), decode_tables.DECODE_COLUMNS).iloc[0]
    assert (shown["Ranks"], shown["Efficiency [95 %]"]) == ("4", "0.750 [0.469 … 1.20]")
    assert pd.isna(short["efficiency"]) and pd.isna(alone["efficiency"])


def test_cases_that_failed_and_flags_are_counted(measured):
    slower = interval("latency", 1, 2, 4, scope="forward", flags=(Flag.GOT_SLOWER,))
    full = [ended(Status.OOM, "full"), interval("latency", 1, 2, 4, scope="forward")]
    cases = [(SIZES | {"name": "good"}, [slower]), (SIZES | {"name": "odd"}, full)]
    rows = measured("attention", cases)
    (bad,) = overview.failures(rows).to_dict("records")
    assert bad["case"].startswith("odd ") and (bad["status"], bad["message"]) == ("oom", "full")
    (line,) = overview.flag_lines(rows)
    assert str(line).startswith(f"1 of 2 timings have the flag {Flag.GOT_SLOWER}: ")


def test_words_are_joined_as_in_a_sentence_each_once():
    words = [overview.join_words(names) for names in ("a", "ab", "abac")]
    assert words == ["a", "a and b", "a, b and c"]


def test_the_roofline_says_what_binds_and_its_predictions_are_dashed(measured):
    cases = [rated("dense", 7e10, 8e10, 9e10), rated("window 8", 9e9, 1e10, 1.1e10, flops=2e5)]
    rows = measured("attention", [*CEILINGS, *cases])
    table = roofline_table(rows, "attention").set_index("name")
    assert table.ridge.tolist() == [10, 10]
    dense, window = table.loc["dense"], table.loc["window 8"]
    assert (dense.intensity, dense.bound, dense.attainable) == (40, "compute", 1e11)
    assert dense.share == pytest.approx(0.8)
    assert (window.intensity, window.bound, window.attainable) == (2, "memory", 2e10)
    (line,) = map(str, roofline_words(rows, "attention"))
    assert "compute-bound in 1 of 2" in line and "dense seq_len=64 reaches 80%" in line
    assert roofline_table(rows, "model").empty
    drawn = str(CHARTS["attention_roofline"](rows).to_dict())
    assert "'rule'" in drawn and "'point'" in drawn and "strokeDash" in drawn


def test_a_case_that_would_not_fit_is_reported_with_its_reason(say):
    why = ended(Status.OOM_PREDICTED, "it needs 9 MiB and 1 MiB are free")
    refused = inference()[0] | {"name": "huge"}, [why]
    text = "\n".join(say("model", [inference(), refused]))
    assert "huge was not started at 64 tokens: it needs 9 MiB" in text


def test_the_baseline_is_of_the_same_run_and_shape(measured):
    shapes = (
        {},
        {"seq_len": 128},
        {"batch_size": 5},
        {"dtype": "bfloat16"},
        {"causal": True},
        {"device": "cuda:0"},
    )
    times = itertools.count(10)
    cases = [[attention_case(name, at - 1, at, at + 1, **shape) for shape in shapes for name, at in
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
    names = {"algorithm": ["pass_q", None], "direction": "forward_backward"}
    shown = tables.readable(pd.DataFrame(names), {name: name for name in names})
    assert shown.to_dict("list") == {
        "algorithm": ["pass q", "—"],
        "direction": ["forward + backward"] * 2,
    }


def test_a_curve_is_warm_up_as_far_as_it_was_needed(measured):
    needed = {"a": 1.0, "b": None, "c": 0.0}
    cases = [warmup_process(name, 1, 10, {0: (9, 9)}, steps) for name, steps in needed.items()]
    table = warmup_view.curve_table(measured("warmup", cases))
    phases = ["warm-up", *["steady"] * 3, *["not settled"] * 4, *["steady"] * 4]
    assert list(table["phase"]) == phases and list(table["ms"]) == [30, 20, 10, 10] * 3
