"""The roofline, cases that were not started, and names as tables write them."""

import pandas as pd
import pytest

from nanolib.measurement import Status
from nanolib.report import tables
from nanolib.report.roofline import roofline_table, roofline_words
from tests.report.cases import inference
from tests.report.rows import SIZES, ceilings_of, ended, rates_of
from tests.shown import CHARTS, VERDICTS


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
