"""FP8, warm-up and energy unlike the notebooks' own: parts left out, or cases that failed."""

import pandas as pd

from nanolib.measurement import Status
from nanolib.report.display import Table
from tests.report.cases import fp8_case, parity_case
from tests.report.rows import ended, points
from tests.shown import CHARTS

SPEED = [fp8_case(1, "bfloat16", 9, 10, 11), fp8_case(1, "fp8", 3.9, 4, 4.1)]


def _empty(chart, rows):
    return CHARTS[chart](rows).to_dict()["usermeta"]["empty"]


def _failed(cases, message):
    return [(factors, [ended(Status.UNSUPPORTED, message)]) for factors, _ in cases]


def test_what_fp8_did_not_measure_is_said_with_its_parameter_and_not_with_other_failures(
    say, measured
):
    cases = [*SPEED, *_failed([fp8_case(2, "fp8", 1, 2, 3)], "no FP8 units")]
    why = "The loss of FP8 was not compared with bf16"
    assert say("fp8", cases)[1] == f"{why}. Next: set parity_recipes."
    rows = measured("fp8", cases)
    assert _empty("fp8_parity", rows) == "no case measured this; set parity_recipes"
    cases = _failed([parity_case("fp8", "worse", 0.1)], "no FP8 units")
    assert say("fp8", cases) == [f"{why}: no FP8 units."]
    assert "no FP8 units" in _empty("fp8_parity", measured("fp8", cases))
    assert say("fp8", []) == ["FP8 was not measured. Next: run nano run quick fp8."]


def test_a_control_does_not_answer_whether_the_loss_matches(say):
    control = parity_case("bf16_again", "equivalent", 0.0, control=True)
    first, second, *_ = say("fp8", [control, parity_case("fp8", "worse", 0.1)])
    assert first.startswith("fp8 has a higher loss") and second.startswith("bf16 again has")


def test_the_label_of_a_time_says_which_way_its_ratio_goes(measured):
    texts = points(CHARTS["fp8_precisions"](measured("fp8", SPEED)), "series", "text")
    assert ("fp8", "4.00 ms, 2.5× as fast as bf16") in texts


def test_an_empty_table_does_not_speak_of_a_measurement():
    empty = Table(pd.DataFrame())
    assert str(empty) == "The table is empty." and "The table is empty." in empty._repr_html_()
