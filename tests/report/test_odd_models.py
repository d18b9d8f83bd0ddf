"""A run of models without a result says why, in its verdict and in its charts."""

from nanolib.measurement import Status
from tests.report.cases import inference, model_case
from tests.report.rows import ended
from tests.shown import CHARTS


def _empty(chart, rows):
    return CHARTS[chart](rows).to_dict()["usermeta"]["empty"]


def test_without_a_result_the_conclusion_says_what_does_not_fit_or_why_cases_failed(say, measured):
    shape = model_case("inference", [])[0]
    refused = [(shape, [ended(Status.OOM_PREDICTED, "needs 25 GiB")])]
    assert say("model", refused) == ["Model latency was not measured: oom_predicted: needs 25 GiB."]
    failed = [(shape | {"mode": "generation"}, [ended(Status.ERROR, "boom at layer 3")])]
    (line,) = say("model", failed)
    assert line.startswith("Model latency was not measured: ") and "boom at layer 3" in line
    rows = measured("model", failed)
    for chart in ("model_peaks", "generation_batches"):
        assert "boom at layer 3" in _empty(chart, rows)
    rows = measured("model", [inference()])
    assert _empty("generation_batches", rows).endswith("set generation_batch_sizes")
