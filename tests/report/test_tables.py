"""Tables: over what a ratio is, where a case under its roof lies, what is counted and what failed."""

import pandas as pd
import pytest

from nanolib.experiments.fp8.view import SECTION as FP8
from nanolib.experiments.fp8.view import speed as fp8
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.report import overview, tables
from nanolib.report.roofline import roofline_table, roofline_words
from tests.report.cases import inference
from tests.report.rows import SIZES, ceilings_of, ended, interval, rates_of
from tests.shown import CHARTS, VERDICTS


def test_speed_ups_of_a_precision_are_over_bf16_of_the_same_run_and_shape(measured):
    def case(precision, low, ms, high, **changes):
        factors = {"preset": "p", "name": "tiny", "mode": "forward", "precision": precision, "compiled": True}
        found = [ended(), interval("latency", low, ms, high, scope="forward", details={"parameters": 700})]
        found += [Measurement("tokens_per_second", 96.0), interval("ceiling_share", 0.1, 0.25, 0.5)]
        found += [Measurement("memory_part", at, scope=name) for at, name in enumerate(PARTS, 1)]
        return factors | {"seq_len": 64, "batch_size": 3} | changes, found

    first = [case("bfloat16", 8, 9, 12), case("fp8_rowwise", 2, 3, 4), case("fp8_rowwise", 2, 3, 4, batch_size=5)]
    second = [case("fp8_rowwise", 2, 3, 4), case("bfloat16", 17, 18, 24, compiled=False)]
    rows = measured("fp8", first, second)
    assert "Over bf16 [95 %]" in FP8.tables["Speed and memory"].readable(rows)
    table = fp8.speed_table(rows)
    assert table["speed_up"].notna().sum() == 1
    line = table.iloc[1].to_dict()
    numbers = {"latency": 3, "latency_low": 2, "latency_high": 4, "speed_up": 3, "speed_up_low": 2, "speed_up_high": 6}
    numbers |= {"tokens_per_second": 96, "mfu": 0.25, "parameters": 700, "weights": 1, "gradients": 2, "optimizer": 3}
    assert {name: line[name] for name in numbers} == pytest.approx(numbers) and line["activations"] == 4


PARTS = ("weights", "gradients", "optimizer", "activations")


def _product(precision, ends=(), cast=(), message="", **shape):
    found = [ended(message=message)]
    found += [interval("latency", *ends, scope="product")] if ends else []
    found += [interval("latency", *cast, scope="product_with_cast")] if cast else []
    return {"m": 2, "k": 3, "n": 5, "precision": precision} | shape, found


def test_products_are_over_bf16_of_the_same_run_and_shape_in_the_order_measured(measured):
    first = [
        _product("bfloat16", (18, 20, 24), m=64),
        _product("fp8", (2, 4, 6), (7, 8, 12), "as told", m=64),
        _product("bfloat16", (8, 9, 12)),
    ]
    second = [_product("fp8", (2, 3, 4), (5, 6, 9))]
    large, bare, alone = fp8.shape_table(measured("fp8", first, second)).to_dict("records")
    assert (large["m"], large["k"], large["n"], large["message"]) == (64, 3, 5, "as told")
    numbers = {"bf16_ms": 20, "fp8_ms": 4, "fp8_with_cast_ms": 8, "speed_up": 5, "with_cast": 2.5}
    numbers |= {"bf16_ms_low": 18, "fp8_with_cast_ms_high": 12, "with_cast_low": 1.5, "with_cast_high": 24 / 7}
    assert {name: large[name] for name in numbers} == pytest.approx(numbers)
    assert (bare["m"], bare["bf16_ms"], bare["message"]) == (2, 9, "") and pd.isna(bare["speed_up"])
    assert alone["fp8_ms"] == 3 and pd.isna(alone["bf16_ms"]) and pd.isna(alone["with_cast"])


def test_cases_that_did_not_end_well_and_flags_are_counted(measured):
    cases = [
        (SIZES | {"name": "good"}, [ended(), interval("latency", 1, 2, 4, scope="forward", flags=(Flag.SLOWDOWN,))]),
        (SIZES | {"name": "odd"}, [ended(Status.OOM, "full"), interval("latency", 1, 2, 4, scope="forward")]),
    ]
    rows = measured("attention", cases)
    bad = overview.failures(rows).to_dict("records")
    assert [(line["case"].split()[0], line["status"], line["message"]) for line in bad] == [("odd", "oom", "full")]
    (line,) = overview.flag_lines(rows)
    assert line.startswith(f"{Flag.SLOWDOWN} (1 of 2 timings): ")


def test_what_must_be_the_same_everywhere_has_a_column_per_method(measured):
    flops = [exact("flops", 10.0, scope="f"), exact("flops", 12.0, scope="f", method="flop_counter")]
    cases = [
        (SIZES | {"name": "b"}, [ended(), *flops]),
        (SIZES | {"name": "a"}, [ended(), flops[0], exact("peak_memory", 3.0)]),
    ]
    table = overview.deterministic(measured("attention", cases))
    assert list(table["case"]) == ["b 64 3 float32", "a 64 3 float32"]
    assert table[["formula", "flop_counter"]].to_numpy().tolist() == [["10", "12"], ["10", ""]]


def test_the_first_and_what_cannot_be_told_from_it():
    cases = pd.DataFrame({"ms": [5.0, 3.0, 4.0, 9.0], "ms_low": [4.0, 2.0, 3.6, 1.0], "ms_high": [6.0, 3.5, 4.5, 20.0]})
    assert list(overview.leaders(cases, "ms").index) == [1, 3]
    assert list(overview.leaders(cases, "ms", ascending=False).index) == [3, 0, 2, 1]
    assert list(overview.leaders(cases.iloc[:3], "ms", ascending=False).index) == [0, 2]
    assert [overview.listed(names) for names in ("a", "ab", "abac")] == ["a", "a and b", "a, b and c"]


def test_the_roofline_says_what_binds_and_its_predictions_are_dashed(measured):
    rates = {"dense": (4e6, 1e5, 8e10), "window 8": (2e5, 1e5, 1e10)}
    cases = [(SIZES | {"name": name}, [ended(), *rates_of("forward", *of)]) for name, of in rates.items()]
    rows = measured("attention", [*ceilings_of().values(), *cases])
    table = roofline_table(rows, "attention").set_index("name")
    assert table.ridge.tolist() == [10, 10]
    dense, window = table.loc["dense"], table.loc["window 8"]
    assert (dense.intensity, dense.bound, dense.attainable, dense.share) == (40, "compute", 1e11, pytest.approx(0.8))
    assert (window.intensity, window.bound, window.attainable) == (2, "memory", 2e10)
    (line,) = map(str, roofline_words(rows, "attention"))
    assert "compute in 1 of 2" in line and "dense n=64 comes nearest to its roof, 80%" in line
    assert roofline_table(rows, "model").empty
    drawn = str(CHARTS["attention_roofline"](rows).to_dict())
    assert "'rule'" in drawn and "'point'" in drawn and "strokeDash" in drawn


def test_a_case_that_would_not_fit_is_told_with_its_reason(measured):
    refused = inference()[0] | {"name": "huge"}, [ended(Status.OOM_PREDICTED, "it needs 9 MiB and 1 MiB are free")]
    text = "\n".join(VERDICTS["model"](measured("model", [(inference()[0], [ended(), *inference()[1]]), refused])))
    assert "huge, n = 64, was not started: it needs 9 MiB" in text


def test_names_in_tables_are_written_as_in_charts_and_flags_as_they_are_stored():
    table = pd.DataFrame({"form": ["pass_q", None], "direction": "forward_backward", "flags": [["few_blocks"]] * 2})
    shown = tables.readable(table, {name: name for name in table})
    assert shown.to_dict("list") == {
        "form": ["pass q", "—"],
        "direction": ["forward + backward"] * 2,
        "flags": ["few_blocks"] * 2,
    }
