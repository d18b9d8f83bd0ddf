"""Roofline, what sparsity does to a model, optimisations beside eager."""

import pytest

from nanolib.measurement import Measurement, Status, exact
from nanolib.report import charts, verdicts
from nanolib.report.quality import quality_table, quality_words
from nanolib.report.roofline import roofline_table, roofline_words
from nanolib.store import Run, Store
from tests.report.test_report import MACHINE, _latency, _time

SHAPE = {"seq_len": 64, "batch_size": 1, "dtype": "float32", "device": "cpu"}


def _ceilings():
    return {
        "c": ({"ceiling": "float32", "device": "cpu"}, [_time(), Measurement("ceiling_flops", 1e11, scope="float32")]),
        "d": ({"ceiling": "copy", "device": "cpu"}, [_time(), Measurement("ceiling_bytes", 1e10, scope="copy")]),
    }


def _rate(scope, flops, moved, achieved):
    return [
        exact("flops", flops, scope=scope),
        exact("bytes", moved, scope=scope),
        Measurement("flops_per_second", achieved, achieved * 0.9, achieved * 1.1, 0.95, 20, scope=scope),
    ]


def _quality(pattern, target, replaced, tuned, half=0.05):
    rows = [
        _time(),
        exact("sparsity", target, method="mask"),
        Measurement("loss", 2.0, 1.9, 2.1, 0.95, 5, scope="dense"),
    ]
    for scope, value in (("replaced", replaced), ("fine_tuned", tuned)):
        rows.append(Measurement("loss_difference", value, value - half, value + half, 0.95, 5, scope=scope))
    return ({"name": f"{pattern} s={target}", "pattern": pattern, "target": target, "seeds": 5, **SHAPE}, rows)


@pytest.fixture
def rows(tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        attention = _ceilings() | {
            "a": (
                {"name": "dense", "causal": True, **SHAPE},
                [_time(), _latency("forward", 1.0), *_rate("forward", 4e6, 1e5, 8e10)],
            ),
            "b": (
                {"name": "window 8", "causal": True, **SHAPE},
                [_time(), _latency("forward", 1.0), *_rate("forward", 2e5, 1e5, 1e10)],
            ),
            "q1": _quality("window", 0.5, 0.2, 0.0),
            "q2": _quality("window", 0.9, 0.6, 0.3),
        }
        store.add(Run("attention", MACHINE, rows=attention, run_id="a1"))
        model = {}
        for name, ms in (("eager", 10.0), ("autocast_bfloat16", 5.0)):
            shown = "tiny" if name == "eager" else "tiny (autocast bfloat16)"
            factors = {"name": shown, "attention_type": "dense", "mode": "inference", "optimisation": name, **SHAPE}
            found = [_time(), _latency("inference", ms), exact("peak_memory", ms, scope="inference")]
            found.append(Measurement("tokens_per_second", 1e4, scope="inference"))
            if name != "eager":
                found.append(exact("relative_error", 3e-3, scope="against_eager", method="logits"))
            model[name] = (factors, found)
        refused = {"name": "huge", "attention_type": "dense", "mode": "inference", "optimisation": "eager", **SHAPE}
        model["huge"] = (refused, [_time(Status.OOM_PREDICTED, "it needs 9 MiB and 1 MiB are free")])
        store.add(Run("model", MACHINE, rows=model, run_id="m1"))
        yield store.measurements(samples=True)


def test_the_roofline_says_what_binds(rows):
    table = roofline_table(rows, "attention").set_index("name")
    assert table.ridge.tolist() == [10, 10]
    dense, window = table.loc["dense"], table.loc["window 8"]
    assert (dense.intensity, dense.bound, dense.attainable, dense.share) == (40, "compute", 1e11, pytest.approx(0.8))
    assert (window.intensity, window.bound, window.attainable) == (2, "memory", 2e10)
    (line,) = roofline_words(rows, "attention")
    assert "compute in 1 of 2" in line and "dense n=64 comes nearest to its roof, 80%" in line
    assert roofline_table(rows, "model").empty


def test_the_loss_that_a_pattern_costs(rows):
    table = quality_table(rows)
    assert table[["target", "replaced", "fine_tuned"]].to_numpy().tolist() == [[0.5, 0.2, 0.0], [0.9, 0.6, 0.3]]
    (line,) = quality_words(rows)
    assert "removes 90%, adds +0.600" in line and "does not take back" in line


def test_an_optimisation_stands_beside_eager(rows):
    text = "\n".join(verdicts.model(rows))
    assert "tiny (autocast bfloat16), n = 64, against eager: inference 2.00× [1.81 … 2.21] as fast (faster)" in text
    assert "inference peak 0.50×" in text and "logits 3.0e-03 away" in text
    assert "huge, n = 64, was not started: it needs 9 MiB" in text


def test_predictions_are_dashed_and_measurements_have_intervals(rows):
    for chart in (charts.attention_roofline(rows), charts.attention_quality(rows)):
        text = str(chart.to_dict())
        assert "'rule'" in text and "'point'" in text
    assert "strokeDash" in str(charts.attention_roofline(rows).to_dict())
    assert "text" in str(charts.model_roofline(rows).to_dict())  # says why it is empty
