"""Runs that are unlike the notebook's own: cases that all failed, one length, several shapes, wide axes."""

import itertools
import math

import pandas as pd
import pytest

from nanolib.experiments.attention import cases as attention
from nanolib.experiments.attention.findings import ATTENTION_COLUMNS
from nanolib.measurement import Status
from nanolib.report.overview import explain_missing, why_empty
from nanolib.run.dry_run import prediction_table
from tests.report.cases import SHAPE, attention_case, quality_case
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
    for name in ("attention_speed_up", "attention_parts", "attention_latency"):
        assert CHARTS[name](rows).to_dict()["usermeta"]["empty"] == why
    quality = CHARTS["attention_quality"](rows).to_dict()["usermeta"]["empty"]
    assert quality == "the loss was not measured; set quality_patterns"
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


@pytest.mark.parametrize("backward", [False, True])
def test_predicted_and_measured_memory_name_their_call(backward):
    params = attention.Params(attention_types=["dense"], backward=backward, quality_patterns=[])
    names = [name for name in prediction_table(attention, params) if "memory" in name]
    calls = ["forward", "forward + backward"][: 1 + backward]
    assert names == [f"peak memory {call} (MiB)" for call in calls]
    assert ATTENTION_COLUMNS["peak_memory"] == "Peak memory forward, MiB"


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("window 256", "sparser pattern"),
        ("block 256", "sparser pattern"),
        ("flex random s=0.9", "smaller block_size"),
        ("block s=0.5", "smaller block_size"),
    ],
)
def test_smaller_tiles_are_advised_only_where_they_remove_pairs(say, name, other):
    cases = [attention_case("dense", 9, 10, 11), attention_case(name, 4, 5, 6, sparsity=0.0)]
    (line,) = (line for line in say("attention", cases) if "removes no pairs" in line)
    assert line.endswith(f"Next: use longer seq_lens or a {other}.")


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
    title, bars = _drawn(rows, "attention_parts")
    assert title["text"] == f"Attention time at the longest sequence length: {lengths[-1]} tokens"
    assert len(bars) == bars["series"].nunique() == 2 * len(SHAPES)
    for name in ("attention_speed_up", "attention_latency"):
        title, points = _drawn(rows, name)
        assert not points.duplicated(["series", "x"]).any()
        one = len(lengths) == 1
        assert ("Sequence length (tokens): 64." in title["subtitle"]) == one
        assert ("Dashed: " in str(title)) != one and ("Tick: " in str(title)) == one
    drawn = str(CHARTS["attention_speed_up"](rows).to_dict())
    assert ("'text': 'dense'" in drawn) != one and ("batch 4, bfloat16  2.00×" in drawn) != one


def test_the_options_that_are_given_are_part_of_a_name():
    options = {"pattern": "window", "window": 32, "seed": 0, "block_size": 16}
    assert attention.kind_name("sparse", options) == "window 32 seed=0 block_size=16"
    options = {"pattern": "random", "sparsity": 0.9, "block_size": 16}
    assert attention.kind_name("flex", options) == "flex random s=0.9 block_size=16"


def test_sparsities_are_shown_in_per_cent_and_ends_of_lines_do_not_cover_each_other(measured):
    cases = []
    for pattern, shift in (("window", 0.02), ("random", 0.0)):
        for target in (0.5, 0.75):
            factors, found = quality_case(target + shift, {"replaced": (0.1, 0.2, 0.4)})
            cases.append((factors | {"pattern": pattern, "name": f"{pattern} {target}"}, found))
    rows = measured("attention", cases)
    _, points = _drawn(rows, "attention_quality")
    ends = points.loc[(points["x"] >= 75) & points["y"].notna(), "end"]
    assert ends.notna().all() and ends.nunique() == 2
    one = _drawn(measured("attention", cases[:1]), "attention_quality")[0]
    assert "Sparsity (%): 52." in one["subtitle"]
