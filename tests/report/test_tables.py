"""Tables: over what a ratio is, where a case under its roof lies, what is counted and what failed."""

import pandas as pd
import pytest

from nanolib.experiments.distributed import tables as decode_tables
from nanolib.experiments.fp8 import view as fp8
from nanolib.measurement import Flag, Measurement, Status, exact
from nanolib.report import overview, tables
from nanolib.report.charts import roofline_table, roofline_words
from tests.report.cases import CEILINGS, fp8_case, inference, rated
from tests.report.rows import SIZES, ended, interval
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
    assert str(line).startswith(f"{Flag.GOT_SLOWER} (1 of 2 timings): ")


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
    assert "compute-bound in 1 of 2" in line and "dense n=64 reaches 80%" in line
    assert roofline_table(rows, "model").empty
    drawn = str(CHARTS["attention_roofline"](rows).to_dict())
    assert "'rule'" in drawn and "'point'" in drawn and "strokeDash" in drawn


def test_a_case_that_would_not_fit_is_reported_with_its_reason(say):
    why = ended(Status.OOM_PREDICTED, "it needs 9 MiB and 1 MiB are free")
    refused = inference()[0] | {"name": "huge"}, [why]
    text = "\n".join(say("model", [inference(), refused]))
    assert "huge, n = 64, was not started: it needs 9 MiB" in text


def test_names_in_tables_are_written_as_in_charts_and_flags_as_they_are_stored():
    names = {"algorithm": ["pass_q", None], "direction": "forward_backward"}
    table = pd.DataFrame(names | {"flags": [["low_sample_count"]] * 2})
    shown = tables.readable(table, {name: name for name in table})
    assert shown.to_dict("list") == {
        "algorithm": ["pass q", "—"],
        "direction": ["forward + backward"] * 2,
        "flags": ["low_sample_count"] * 2,
    }
