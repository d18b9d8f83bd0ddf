"""Runs that are unlike the notebook's own: cases that all failed, one length, several shapes, wide axes."""

from nanolib.measurement import Status
from nanolib.report.overview import explain_missing, why_empty
from tests.report.cases import SHAPE, attention_rows
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
