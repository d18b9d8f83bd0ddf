"""No verdict on models and warm-up claims more than its intervals."""

import pytest

from nanolib.experiments.model.view import generation_batches
from nanolib.measurement import Measurement, exact
from tests.report.cases import inference, model_case, timed, training
from tests.report.rows import warmup_process


def test_a_model_is_reported_with_its_batch_its_tail_and_its_ratios(say):
    generation = [timed("prefill", 19, 20, 22), timed("decode", 1.9, 2, 2.5, predicted=0.5)]
    generation.append(Measurement("tokens_per_second", 1500.0, scope="decode"))
    generation.append(Measurement("tokens_per_second", 9600.0, scope="prefill"))
    longest = {"seq_len": 128}
    step = training([(9, 10, 11), (19, 20, 21), (5, 6, 7)], **longest)
    cases = [
        inference(**longest),
        step,
        model_case("generation", generation, **longest),
        inference(1, 2, 3),
    ]
    shape = "tiny (dense, float32), batch 3, 128 tokens"
    first, *others = say("model", cases)
    assert first == (
        f"{shape}: Inference takes 12.0 ms [11.0 … 15.0], a generated token 2.00 ms [1.90 … 2.50] and a training step 36.0 ms "
        "[35.0 … 39.0]: the first token takes 20.0 ms [19.0 … 22.0]; p99 of later tokens is 6 ms; "
        "training peaks at 60 MiB, 12.0× the weights."
    )
    assert not any("takes" in other for other in others)  # one sentence for each model


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((5, 6, 7), "inference is 2.00× [1.57 … 3.00] as fast (faster)"),
        ((5, 6, 11), "inference is 2.00× [1.00 … 3.00] as fast (no clear difference)"),
        ((16, 24, 25), "inference is 0.50× [0.44 … 0.94] as fast (slower)"),
    ],
)
def test_an_optimization_is_faster_or_slower_when_the_ranges_do_not_overlap(say, ends, said):
    shape = {"name": "tiny (compile)", "optimization": "compile"}
    cases = [inference(), inference(*ends, **shape), inference(1, 2, 3, seq_len=32)]
    cases.append(inference(1, 2, 3, seq_len=32, **shape))
    lines = [line for line in say("model", cases) if "versus eager" in line]
    assert lines == [f"tiny (compile) float32 versus eager float32 at 64 tokens: {said}."]


def _processes(direction, needed, ratios=(1.0,) * 5, message=""):
    """Fresh processes whose mean without warm-up is so many times that after five steps."""
    return [
        warmup_process(
            direction,
            at,
            10,
            {0: (10.0, 12.0 * ratio), 5: (10.0, 12.0), 2: (10.0, 12.0)},
            one,
            message,
        )
        for at, (one, ratio) in enumerate(zip(needed, ratios, strict=True), 1)
    ]


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        ([0] * 5, "No warm-up step is needed for forward + backward: none of 5 fresh processes needs a warm-up step. "
                  "The steady step time is 10.2 ms."),

        ([1, 2, 1, 1, 2],
         "2 warm-up steps are enough for forward + backward: 5 processes need 1, 2, 1, 1, 2 steps. "
         "The steady step time is 10.2 ms."),
        ([1, None, 1, 1, None],
         "The warm-up of forward + backward is unclear in 2 of 5 fresh processes: it never settles. "
         "The other processes need 1, 1, 1 steps. Next: increase curve_steps"),

    ],
)  # fmt: skip
def test_how_many_warm_up_steps_are_enough_in_every_process(say, needed, said):
    line = say("warmup", _processes("forward_backward", needed, message="it never settles"))[0]
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((2.5, 2.4, 2.6, 2.2, 2.9), "The mean time of forward is higher without warm-up than after 5 steps: +150% [+120% … +190%]"),
        ((1.1, 1.2, 0.99, 1.1, 1.1),
         "No clear difference between the mean times of forward without warm-up and after 5 steps: +10% [-1% … +20%] "
         "(the intervals overlap)"),

    ],
)  # fmt: skip
def test_what_no_warm_up_does_to_the_mean_is_reported_over_all_processes(say, ratios, said):
    _, line = say("warmup", _processes("forward", [3] * 5, ratios))
    assert line == f"{said}, the range over 5 processes, and a CV of 33%."


PARTS = [
    ["weights", "a", "", "", 2**20],
    ["saved activations", "b.*", "aten::mm", "mine:7", 3 * 2**20],
]


def test_a_peak_is_reported_with_what_uses_it(say):
    row = exact("peak_memory", 4.0, scope="training_step", predicted=4.0, details={"parts": PARTS})
    lines = say("model", [inference(), model_case("training", [row])])
    assert next(line for line in lines if "Peak memory" in line) == (
        "tiny (dense, float32), batch 3, 64 tokens: Peak memory (training step) is 4 MiB, of which saved activations are 75%: "
        "weights 25%; the plan is 4 MiB."
    )


def _generation(batch, low, ms, high):
    rows = [timed("prefill", 1, 2, 3), timed("decode", low, ms, high)]
    rows.append(Measurement("tokens_per_second", 1e3 * batch / ms, scope="decode"))
    return model_case("generation", rows, batch_size=batch)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            (1.9, 2, 2.1),
            "Batch 4 generates 4.00× the tokens/s of batch 1: each user gets 500 instead of 500",
        ),
        (
            (7, 8, 9),
            "Batch 4 generates 1.00× the tokens/s of batch 1 (no clear difference): each user",
        ),
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
        "tiny (dense, float32), batch 3, 64 tokens: 25% of greedy tokens differ between prefill and decode: "
        "logits differ by at most 12 ULP."
    ] * (agreement < 1)
