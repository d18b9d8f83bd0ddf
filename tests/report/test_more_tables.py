"""Roofline, what sparsity does to a model, optimisations beside eager."""

import re

import pandas as pd
import pytest
import vl_convert

from nanolib.experiments.attention.view.quality import quality_table, quality_words
from nanolib.measurement import Measurement, Status, exact
from nanolib.report import renderer, tables
from nanolib.report.palette import PALETTE, TEXT
from nanolib.report.roofline import roofline_table, roofline_words
from nanolib.store import Run, Store
from tests.report.rounds import in_turns
from tests.report.rows import MACHINE, ceilings_of, ended, latency, rates_of
from tests.shown import CHARTS, VERDICTS

SHAPE = {"seq_len": 64, "batch_size": 1, "dtype": "float32", "device": "cpu"}


def _quality(pattern, target, replaced, tuned, half=0.05):
    rows = [
        ended(),
        exact("sparsity", target, method="mask"),
        Measurement("loss", 2.0, 1.9, 2.1, 0.95, 5, scope="dense"),
    ]
    for scope, value in (("replaced", replaced), ("fine_tuned", tuned)):
        rows.append(Measurement("loss_difference", value, value - half, value + half, 0.95, 5, scope=scope))
    return ({"name": f"{pattern} s={target}", "pattern": pattern, "target": target, "seeds": 5, **SHAPE}, rows)


@pytest.fixture
def rows(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        attention = ceilings_of() | {
            "a": (
                {"name": "dense", "causal": True, **SHAPE},
                [ended(), latency("forward", 1.0), *rates_of("forward", 4e6, 1e5, 8e10)],
            ),
            "b": (
                {"name": "window 8", "causal": True, **SHAPE},
                [ended(), latency("forward", 1.0), *rates_of("forward", 2e5, 1e5, 1e10)],
            ),
            "q1": _quality("window", 0.5, 0.2, 0.0),
            "q2": _quality("window", 0.9, 0.6, 0.3),
        }
        store.add(Run("attention", MACHINE, rows=in_turns("attention", attention), run_id="a1"))
        model = {}
        for name, ms in (("eager", 10.0), ("autocast_bfloat16", 5.0)):
            shown = "tiny" if name == "eager" else "tiny (autocast bfloat16)"
            factors = {"name": shown, "attention_type": "dense", "mode": "inference", "optimisation": name, **SHAPE}
            found = [ended(), latency("inference", ms), exact("peak_memory", ms, scope="inference")]
            found.append(Measurement("tokens_per_second", 1e4, scope="inference"))
            if name != "eager":
                found.append(exact("relative_error", 3e-3, scope="against_eager", method="logits"))
            model[name] = (factors, found)
        refused = {"name": "huge", "attention_type": "dense", "mode": "inference", "optimisation": "eager", **SHAPE}
        model["huge"] = (refused, [ended(Status.OOM_PREDICTED, "it needs 9 MiB and 1 MiB are free")])
        store.add(Run("model", MACHINE, rows=in_turns("model", model), run_id="m1"))
        yield store.measurements(samples=True)


def test_the_roofline_says_what_binds(rows):
    table = roofline_table(rows, "attention").set_index("name")
    assert table.ridge.tolist() == [10, 10]
    dense, window = table.loc["dense"], table.loc["window 8"]
    assert (dense.intensity, dense.bound, dense.attainable, dense.share) == (40, "compute", 1e11, pytest.approx(0.8))
    assert (window.intensity, window.bound, window.attainable) == (2, "memory", 2e10)
    (line,) = map(str, roofline_words(rows, "attention"))
    assert "compute in 1 of 2" in line and "dense n=64 comes nearest to its roof, 80%" in line
    assert roofline_table(rows, "model").empty


def test_the_loss_that_a_pattern_costs(rows):
    table = quality_table(rows)
    assert table[["target", "replaced", "fine_tuned"]].to_numpy().tolist() == [[0.5, 0.2, 0.0], [0.9, 0.6, 0.3]]
    (line,) = map(str, quality_words(rows))
    assert "removes 90%, costs loss, and the fine-tune does not take back all of it: +0.600" in line


def test_an_optimisation_stands_beside_eager(rows):
    text = "\n".join(VERDICTS["model"](rows))
    assert "tiny (autocast bfloat16), n = 64, against eager: inference 2.00× [1.81 … 2.21] as fast (faster)" in text
    assert "inference peak 0.50×" in text and "logits 3.0e-03 away" in text
    assert "huge, n = 64, was not started: it needs 9 MiB" in text


def test_predictions_are_dashed_and_measurements_have_intervals(rows):
    for chart in (CHARTS["attention_roofline"](rows), CHARTS["attention_quality"](rows)):
        text = str(chart.to_dict())
        assert "'rule'" in text and "'point'" in text
    assert "strokeDash" in str(CHARTS["attention_roofline"](rows).to_dict())
    assert "text" in str(CHARTS["model_roofline"](rows).to_dict())  # says why it is empty


def test_names_in_tables_are_written_as_in_charts_and_flags_as_they_are_stored():
    table = pd.DataFrame({"form": ["pass_q", None], "direction": "forward_backward", "flags": [["few_blocks"]] * 2})
    shown = tables.readable(table, {name: name for name in table})
    assert shown.to_dict("list") == {
        "form": ["pass q", "—"],
        "direction": ["forward + backward"] * 2,
        "flags": ["few_blocks"] * 2,
    }


def test_a_legend_of_shapes_alone_has_the_colour_of_text(rows):
    drawn = vl_convert.vega_to_svg(renderer.vega_spec(CHARTS["attention_roofline"](rows)))
    fills = re.findall(r'role-legend-symbol.*?fill="(.*?)"', drawn)
    assert set(fills) == {*PALETTE[:2], TEXT}
