"""Runs that are unlike the notebook's own: cases that all failed, one length, several shapes, wide axes."""

import itertools
import math

import pandas as pd
import pytest

from nanolib.measurement import Status
from nanolib.report.overview import explain_missing, why_empty
from tests.report.cases import SHAPE, attention_case
from tests.report.rows import ended
from tests.shown import CHARTS


def _failed(*endings):
    """Cases of attention that have no result, by their status and message."""
    return [(SHAPE | {"name": f"own {at}"}, [ended(*one)]) for at, one in enumerate(endings)]


def test_the_first_failure_is_the_reason_in_the_conclusion_and_the_charts(say, measured):
    why = "unsupported: flash-attn is not installed"
    cases = _failed(
        (Status.UNSUPPORTED, "flash-attn is not installed"), (Status.ERROR, "ValueError: odd")
    )
    assert say("attention", cases) == [f"Attention was not measured: {why}."]
    rows = measured("attention", cases)
    for name in ("attention_speed_up", "attention_latency"):
        assert CHARTS[name](rows).to_dict()["usermeta"]["empty"] == why
    quality = CHARTS["attention_quality"](rows).to_dict()["usermeta"]["empty"]
    assert quality == "the loss was not measured; set quality_attentions"
    (nothing,) = explain_missing(rows, "warmup", "Warm-up")
    assert str(nothing) == "Warm-up was not measured. Next: run nano run quick warmup."


def test_a_remedy_stands_only_where_no_case_failed(measured):
    dense = attention_case("dense", 9, 10, 11)
    rows = measured("attention", [dense])
    assert why_empty(rows, "attention", "set backward") == "set backward"
    assert why_empty(rows, "attention") == "no case has this result"
    assert why_empty(rows, "model").endswith("run: nano run quick model")
    rows = measured("attention", [dense, *_failed((Status.OOM, ""))])
    assert why_empty(rows, "attention", "set backward") == "oom"


def test_ones_own_attention_is_told_before_what_was_not_measured(say):
    own = [attention_case("own (x:y)", 4, 5, 6, sparsity=math.nan, batch_size=n) for n in (1, 2)]
    lines = say(
        "attention", [attention_case("dense", 9, 10, 11, batch_size=n) for n in (1, 2)] + own
    )
    assert ["own (x:y) is faster than dense" in line for line in lines] == [True, True, False]
    assert lines[2].startswith("Sparse attention was not compared with dense attention: no mask")


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
