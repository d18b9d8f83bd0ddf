"""Runs that are unlike the notebook's own: a failed case, one length, several shapes, options."""

import itertools
import math

import pytest

from nanolib.measurement import Status, exact
from nanolib.report.section import explain_empty
from nanolib.report.theme import is_empty
from tests.report.cases import SHAPE, attention_case
from tests.report.rows import ended, points
from tests.shown import CHARTS


def test_a_remedy_stands_only_where_no_case_failed(measured):
    dense = attention_case("dense", 9, 10, 11)
    rows = measured("attention", [dense])
    assert explain_empty(rows, "attention", "set backward") == "set backward"
    assert explain_empty(rows, "attention") == "no case has this result"
    assert explain_empty(rows, "model").endswith("run: nano run quick model")
    rows = measured("attention", [dense, (SHAPE | {"name": "own"}, [ended(Status.OOM)])])
    assert explain_empty(rows, "attention", "set backward") == "oom"


def test_ones_own_attention_is_told_before_what_was_not_measured(say):
    cases = []
    for n in (1, 2):
        cases.append(attention_case("dense", 9, 10, 11, batch_size=n))
        cases.append(attention_case("own (x:y)", 4, 5, 6, sparsity=math.nan, batch_size=n))
    lines = say("attention", cases)
    assert ["own (x:y) is faster than dense" in line for line in lines] == [True, True, False]
    assert lines[2].startswith("Sparse attention was not compared with dense attention: no mask")


def test_an_attention_that_computes_something_else_is_not_called_faster(say, measured):
    own, found = attention_case("own (x:y)", 4, 5, 6, sparsity=math.nan)
    wrong = own, [*found, exact("relative_error", 2.7, scope="forward")]
    cases = [attention_case("dense", 9, 10, 11), wrong]
    lines = say("attention", cases)
    assert not any("own (x:y) is faster" in line for line in lines)
    assert is_empty(CHARTS["attention_speed_up"](measured("attention", cases)))
    assert "own (x:y) does not return the output" in lines[0] and "error is 2.7" in lines[0]


@pytest.mark.parametrize("lengths", [(64,), (64, 128)])
def test_shapes_have_series_of_their_own_and_a_single_length_is_said(measured, lengths):
    cases = []
    for n, batch, dtype in itertools.product(lengths, (1, 4), ("float32", "bfloat16")):
        shape = {"seq_len": n, "batch_size": batch, "dtype": dtype}
        cases.append(attention_case("dense", 9, 10, 11, **shape))
        cases.append(attention_case("window 32", 4, 5, 6, tiles=0.9, **shape))
    rows = measured("attention", cases)
    for name in ("attention_speed_up", "attention_latency"):
        chart = CHARTS[name](rows)
        drawn = points(chart, "series", "x")
        assert len(drawn) == len({*drawn})
        one, words = len(lengths) == 1, str(chart.title.subtitle)
        assert ("Sequence length (tokens): 64." in words) == ("Tick: " in words) == one
        assert ("Dashed: " in words) != one
