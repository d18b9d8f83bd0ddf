"""What is said and drawn of a model's memory, and of batches."""

import pytest

from nanolib.experiments.model.view import generation_batches
from nanolib.measurement import Measurement, exact
from tests.report.cases import inference, model_case, timed

PARTS = [
    ["weights", "a", "", "", 2**20],
    ["saved activations", "b.*", "aten::mm", "mine:7", 3 * 2**20],
]


def test_a_peak_is_reported_with_what_uses_it(say):
    row = exact("peak_memory", 4.0, scope="training_step", predicted=4.0, details={"parts": PARTS})
    lines = say("model", [inference(), model_case("training", [row])])
    assert next(line for line in lines if "peak of" in line) == (
        "tiny (dense, float32), batch 3, n = 64: The peak of a training step is 4 MiB, of which saved activations are 75%: "
        "weights 25%; planned: 4 MiB."
    )


def _generation(batch, low, ms, high):
    rows = [timed("prefill", 1, 2, 3), timed("decode", low, ms, high)]
    rows.append(Measurement("tokens_per_second", 1e3 * batch / ms, scope="decode"))
    return model_case("generation", rows, batch_size=batch)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((1.9, 2, 2.1), "Batch 4 gives 4.00× the tokens/s of batch 1: each user gets 500 → 500"),
        ((7, 8, 9), "Batch 4 gives 1.00× the tokens/s of batch 1 (no clear difference): each user"),
    ],
)
def test_the_largest_batch_is_compared_with_the_smallest(say, ends, said):
    cases = [inference(), _generation(1, 1.9, 2, 2.1), _generation(4, *ends)]
    assert said in next(line for line in say("model", cases) if "Batch" in line)


def test_tokens_of_all_users_and_of_each_are_drawn_over_the_batch(measured):
    rows = measured("model", [_generation(1, 1.9, 2, 2.1), _generation(4, 15, 16, 17)])
    spec = generation_batches(rows).to_dict()
    drawn = [row for data in spec["datasets"].values() for row in data if "panel" in row]
    assert {(row["panel"], row["x"]): row["y"] for row in drawn} == {
        ("all users", 1): 500,
        ("all users", 4): 250,
        ("each user", 1): 500,
        ("each user", 4): 62.5,
    }


@pytest.mark.parametrize("agreement", [1.0, 0.75])
def test_greedy_tokens_are_a_finding_only_if_they_differ(say, agreement):
    factors, rows = inference()
    for scope, share in (("run_to_run", 1.0), ("batch", 1.0), ("decode", agreement)):
        rows.append(exact("ulp_difference", 12.0, scope=scope))
        rows.append(exact("greedy_agreement", share, scope=scope))
    found = [line for line in say("model", [(factors, rows)]) if "greedy" in line]
    assert found == [
        "tiny (dense, float32), batch 3, n = 64: 25% of greedy tokens differ between prefill and decode: "
        "logits differ by at most 12 ULP."
    ] * (agreement < 1)
