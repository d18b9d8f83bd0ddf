"""Runs that are unlike the notebook's own: cases that all failed, one length, several shapes, wide axes."""

import itertools
import math

import pandas as pd
import pytest

from nanolib.experiments.attention import cases as attention
from nanolib.experiments.attention.findings import attention_table
from nanolib.measurement import Measurement, Status, exact
from nanolib.report.axis import log_ticks
from nanolib.report.overview import explain_missing, why_empty
from nanolib.run.dry_run import prediction_table
from tests.report.cases import SHAPE, attention_case
from tests.report.rows import ended, interval
from tests.shown import CHARTS

CEILINGS = [
    ({"ceiling": scope, "device": "cpu"}, [Measurement(metric, rate, scope=scope)])
    for metric, scope, rate in (("ceiling_flops", "float32", 1e11), ("ceiling_bytes", "copy", 1e10))
]


def _failed(*endings):
    """Cases of attention that have no result, by their status and message."""
    return [(SHAPE | {"name": f"own {at}"}, [ended(*one)]) for at, one in enumerate(endings)]


REFUSED = "2 unsupported: flash-attn is not installed; cuDNN needs a GPU, 1 error: ValueError: odd"


def test_cases_that_all_failed_have_their_reasons_in_the_conclusion_and_the_charts(say, measured):
    cases = _failed(
        (Status.UNSUPPORTED, "flash-attn is not installed"),
        (Status.UNSUPPORTED, "cuDNN needs a GPU"),
        (Status.ERROR, "ValueError: odd"),
    )
    why = f"no case has a result ({REFUSED})"
    assert say("attention", cases) == [f"Attention was not measured: {why}."]
    rows = measured("attention", cases)
    for name in ("attention_speed_up", "attention_latency"):
        assert CHARTS[name](rows).to_dict()["usermeta"]["empty"] == why
    quality = CHARTS["attention_quality"](rows).to_dict()["usermeta"]["empty"]
    assert quality == "the loss was not measured; set quality_attentions"
    (nothing,) = explain_missing(rows, "warmup", "Warm-up")
    assert str(nothing) == "Warm-up was not measured. Next: run nano run quick warmup."


def test_a_remedy_stands_only_where_no_case_failed_and_other_results_are_no_failure(measured):
    dense = attention_case("dense", 9, 10, 11)
    rows = measured("attention", [dense])
    assert why_empty(rows, "attention", "set backward") == "set backward"
    assert why_empty(rows, "attention") == "no case has this result"
    rows = measured("attention", [dense, *_failed((Status.OOM, "full"))])
    assert why_empty(rows, "attention") == "no case has this result (1 oom: full)"
    rows = measured("attention", [*CEILINGS, *_failed((Status.OOM, ""))])
    assert why_empty(rows, "attention", "set backward") == "no case has a result (1 oom)"


def test_a_rate_above_the_roofline_is_not_cut_off_with_its_interval(say):
    factors, timed = attention_case("dense", 9, 10, 11)
    work = [exact("flops", 4e6, scope="forward"), exact("bytes", 1e5, scope="forward")]
    rate = interval("flops_per_second", 0.3e11, 1.5e11, 1.6e11, scope="forward")
    cases = [*CEILINGS, (factors, [*timed, *work, rate])]
    (line,) = (line for line in say("attention", cases) if "Forward is" in line)
    words = "reaches 150% [30% … 160%] of the roofline's 100 GFLOP/s"
    assert line.endswith(f"dense seq_len=64 {words} (the interval includes the roofline).")


def test_ones_own_attention_is_told_before_what_was_not_measured(say):
    own = [attention_case("own (x:y)", 4, 5, 6, sparsity=math.nan, batch_size=n) for n in (1, 2)]
    lines = say(
        "attention", [attention_case("dense", 9, 10, 11, batch_size=n) for n in (1, 2)] + own
    )
    assert ["own (x:y) is faster than dense" in line for line in lines] == [True, True, False]
    measured = "only dense kernels and your own attentions were measured."
    assert lines[2].startswith(f"Sparse attention was not measured: {measured}")
    assert "only your own attentions were" in say("attention", own)[0]


SHAPES = list(itertools.product((1, 4), ("float32", "bfloat16")))


def _drawn(rows, name):
    """The title and subtitle of a chart, and the points or parts of bars that it draws."""
    spec = CHARTS[name](rows).to_dict()
    points = [line for data in spec["datasets"].values() for line in data if "series" in line]
    return spec["title"], pd.DataFrame(points)


@pytest.mark.parametrize("lengths", [(64,), (64, 128)])
def test_shapes_have_series_of_their_own_and_a_single_length_is_said(measured, lengths):
    cases = []
    for n, (batch, dtype) in itertools.product(lengths, SHAPES):
        shape = {"seq_len": n, "batch_size": batch, "dtype": dtype}
        cases.append(attention_case("dense", 9, 10, 11, **shape))
        cases.append(attention_case("window 32", 4, 5, 6, tiles=0.9, **shape))
    rows = measured("attention", cases)
    for name in ("attention_speed_up", "attention_latency"):
        title, points = _drawn(rows, name)
        assert not points.duplicated(["series", "x"]).any()
        one = len(lengths) == 1
        assert ("Sequence length (tokens): 64." in title["subtitle"]) == one
        assert ("Dashed: " in str(title)) != one and ("Tick: " in str(title)) == one


def test_options_in_which_cases_of_one_name_differ_follow_the_name(say, measured):
    cases = [attention_case("dense", 9, 10, 11), attention_case("random s=0.9", 4, 5, 6)]
    for seed, size in ((0, 16), (0, 64)):
        options = {"options": {"window": 32, "seed": seed, "block_size": size}}
        cases.append(attention_case("window 32", 4, 5, 6, **options))
    cases.append(attention_case("window 32", 3, 4, 5, options={"window": 32}))
    names = ["window 32, block_size 16", "window 32, block_size 64", "window 32"]
    rows = measured("attention", cases)
    named = ["dense", "random s=0.9", "window 32, seed 0, block_size 16"]
    named += ["window 32, seed 0, block_size 64", "window 32"]
    assert attention_table(rows)["name"].tolist() == named
    rows = measured("attention", cases[:-1])
    assert attention_table(rows)["name"].tolist() == ["dense", "random s=0.9", *names[:2]]
    for name in ("attention_speed_up", "attention_latency"):
        assert set(names[:2]) < set(_drawn(rows, name)[1]["series"])
    kinds = [{"kind": "sparse", "pattern": "window", "block_size": size} for size in (16, 64)]
    params = attention.Params(attention_types=kinds, seq_lens=[64], quality_attentions=[])
    predicted = prediction_table(attention, params)["case"]
    assert [name.partition("float32 ")[2] for name in predicted] == [
        "block_size=16",
        "block_size=64",
    ]


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (6.1, 7.8, [6.5, 7, 7.5]),
        (11, 19, [12, 14, 16, 18]),
        (2.1, 4.9, [2.5, 3, 3.5, 4, 4.5]),
        (0.25, 0.55, [0.3, 0.4, 0.5]),
        (0.9, 21, [1, 2, 5, 10, 20]),
        (1.5, 700, [2, 5, 10, 20, 50, 100, 200, 500]),
        (0.9, 700, [1, 10, 100]),
        (3, 3, []),
    ],
)
def test_a_logarithmic_axis_has_three_ticks_or_more(low, high, found):
    assert log_ticks(low, high) == found
