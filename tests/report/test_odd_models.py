"""Runs that are unlike the notebooks' own: several dtypes, cases that all failed, tiny or many models."""

from nanolib.experiments.model.tables import part_table
from nanolib.measurement import Measurement, Status, exact
from tests.report.cases import inference, model_case, timed
from tests.report.rows import ended
from tests.shown import CHARTS


def _drawn(chart, rows):
    """The subtitle of a chart, and the lines of its data."""
    spec = CHARTS[chart](rows).to_dict()
    data = [line for lines in spec["datasets"].values() for line in lines]
    return spec["title"].get("subtitle"), data


def _empty(chart, rows):
    return CHARTS[chart](rows).to_dict()["usermeta"]["empty"]


def _peak(mib, **shape):
    parts = [["weights", "a", "", "", mib * 2**20]]
    row = exact("peak_memory", mib, scope="training_step", details={"parts": parts})
    return model_case("training", [row], **shape)


def test_each_attention_type_and_dtype_has_its_own_bar_of_memory(measured):
    shapes = [(kind, dtype) for kind in ("dense", "sparse") for dtype in ("float32", "bfloat16")]
    cases = [_peak(1.774, attention_type=kind, dtype=dtype) for kind, dtype in shapes]
    _, bars = _drawn("model_peaks", measured("model", cases))
    names = {f"tiny, {kind}, {dtype}, training step at 64 tokens" for kind, dtype in shapes}
    assert {bar["series"] for bar in bars} == names and len(bars) == 4
    assert {bar["text"] for bar in bars} == {"1.774 MiB"}
    assert part_table(measured("model", cases))["name"].nunique() == 4


def test_every_model_has_its_memory_in_the_table_and_the_chart_says_what_it_leaves_out(measured):
    rows = measured("model", [_peak(1, name=f"m{at}") for at in range(13)])
    subtitle, bars = _drawn("model_peaks", rows)
    assert len(bars) == 12 and subtitle[1] == "The chart shows 12 of 13 models."
    assert part_table(rows)["name"].nunique() == 13
    assert len(_drawn("model_peaks", measured("model", [_peak(1)]))[0]) == 1


def test_a_dtype_is_compared_at_the_batch_that_all_calls_have(say):
    cases = []
    for dtype, ms in (("float32", 12), ("bfloat16", 6)):
        cases.append(inference(0.9 * ms, ms, 1.1 * ms, dtype=dtype))
        for batch in (3, 16):
            rows = [timed("prefill", 1, 2, 3), timed("decode", 0.9 * ms, ms, 1.1 * ms)]
            cases.append(model_case("generation", rows, dtype=dtype, batch_size=batch))
    (line,) = [line for line in say("model", cases) if "relative to" in line]
    assert line == (
        "tiny (dense, bfloat16), batch 3, 64 tokens: The speed relative to eager float32 is "
        "2.00× [1.64 … 2.44] (inference, faster) and 2.00× [1.64 … 2.44] (next token, faster)."
    )


def test_the_memory_of_a_tiny_model_is_not_zero(say):
    peak = Measurement("peak_memory", 0.337, scope="training_step")
    step = model_case("training", [timed("training_step", 1, 2, 3), peak])
    assert any("training peaks at 0.3370 MiB" in line for line in say("model", [inference(), step]))


def test_without_a_result_the_conclusion_says_what_does_not_fit_or_why_cases_failed(say, measured):
    shape = model_case("inference", [])[0]
    refused = [(shape, [ended(Status.OOM_PREDICTED, "needs 25 GiB")])]
    assert say("model", refused) == ["tiny was not started at 64 tokens: needs 25 GiB."]
    failed = [(shape | {"mode": "generation"}, [ended(Status.ERROR, "boom at layer 3")])]
    failed.append(({"name": "tiny", "steps": 20}, [ended(Status.ERROR, "boom at layer 3")]))
    (line,) = say("model", failed)
    assert line.startswith("Model latency was not measured: ") and "boom at layer 3" in line
    rows = measured("model", failed)
    for chart in ("model_peaks", "generation_batches", "model_loss"):
        assert "boom at layer 3" in _empty(chart, rows)
    rows = measured("model", [inference()])
    assert _empty("generation_batches", rows).endswith("set generation_batch_sizes")
    assert _empty("model_loss", rows).endswith("set loss_steps")
