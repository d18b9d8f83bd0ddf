"""Runs that are unlike the notebook's own: cases that all failed, one length, several shapes, wide axes."""

import math

import pytest

from nanolib.experiments.attention import cases as attention
from nanolib.experiments.attention.findings import ATTENTION_COLUMNS
from nanolib.measurement import Status
from nanolib.report.overview import explain_missing, why_empty
from nanolib.run.dry_run import prediction_table
from tests.report.cases import CEILINGS, SHAPE, attention_case, attention_rows, rated
from tests.report.rows import ended
from tests.shown import CHARTS


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
    for name in ("attention_speed_up", "attention_parts", "attention_latency"):
        assert CHARTS[name](rows).to_dict()["usermeta"]["empty"] == why
    quality = CHARTS["attention_quality"](rows).to_dict()["usermeta"]["empty"]
    assert quality == "the loss was not measured; set quality_patterns"
    (nothing,) = explain_missing(rows, "warmup", "Warm-up")
    assert str(nothing) == "Warm-up was not measured. Next: run nano run quick warmup."


def test_a_remedy_stands_only_where_no_case_failed(measured):
    rows = measured("attention", attention_rows({("dense", 64): 10}, [("own x", 64)]).values())
    assert why_empty(rows, "attention", "set backward") == "set backward"
    rows = measured("attention", _failed((Status.OOM, "")))
    assert why_empty(rows, "attention", "set backward") == "no case has a result (1 oom)"


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


def test_a_rate_above_the_roofline_is_not_cut_off_with_its_interval(say):
    cases = [*CEILINGS, rated("dense", 0.3e11, 1.5e11, 1.6e11)]
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
