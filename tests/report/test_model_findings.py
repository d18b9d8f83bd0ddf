"""No verdict on models and warm-up claims more than its intervals."""

import pytest

from nanolib.measurement import exact
from tests.report.cases import inference, model_case, timed, warmup_process
from tests.report.rows import points
from tests.shown import CHARTS, VERDICTS

TINY = "tiny (dense, float32), batch 3, 64 tokens"


@pytest.mark.parametrize(
    ("needed", "ratio", "said"),
    [
        ([1, 2, 1, 1, 2], 1.06,
         "2 warm-up steps are enough for forward + backward: 5 processes need 1, 2, 1, 1, 2 steps. "
         "The steady step time is 10.2 ms."),
        ([1] * 5, 1.06,
         "1 warm-up step is enough for forward + backward: 5 processes need 1, 1, 1, 1, 1 steps"),
        ([1, None, 1, 1, None], 1.0,
         "The warm-up of forward + backward is unclear in 2 of 5 fresh processes: it never "
         "settles. Warm-up steps of the other processes: 1, 1, 1. Next: increase curve_steps"),
        ([0] * 5, 1.04,
         "No warm-up step is needed for forward + backward: none of 5 fresh processes needs a"),
        ([0] * 5, 1.06,
         "Use 5 warm-up steps for forward + backward: no curve shows warm-up, but the mean is 6% "
         "higher without warm-up. The steady step time is 10.2 ms. Next: repeat the run."),
    ],
)  # fmt: skip
def test_enough_warm_up_is_that_of_every_process_or_where_no_curve_shows_it_of_the_mean(
    say, needed, ratio, said
):
    means, why = {0: 12.0 * ratio, 5: 12.0}, "it never settles"
    processes = [
        warmup_process("forward_backward", at, means, one, why) for at, one in enumerate(needed)
    ]
    line = say("warmup", processes)[0]
    assert line.startswith(said) and ("repeat the run" in line) == ("repeat the run" in said)


@pytest.mark.parametrize(("weights", "said"), [(2**20, "75%: weights 25%; "), (2**10, "100%: ")])
def test_a_peak_is_reported_and_drawn_with_what_uses_it(measured, weights, said):
    parts = [
        ["weights", "a", "", "", weights],
        ["saved activations", "b.*", "aten::mm", "mine:7", 3 * 2**20],
    ]
    row = exact("peak_memory", 4.0, scope="training_step", predicted=4.0, details={"parts": parts})
    rows = measured("model", [inference(), model_case("training", [row])])
    assert next(line for line in VERDICTS["model"](rows) if "Peak memory" in line) == (
        f"{TINY}: Peak memory (training step) is 4 MiB, of which saved activations are {said}"
        "the plan is 4 MiB."
    )
    bars = [("saved activations", 3.0, "4 MiB"), ("weights", weights / 2**20, "")]
    assert points(CHARTS["model_peaks"](rows), "part", "x", "text") == bars


@pytest.mark.parametrize("agreement", [1.0, 0.75])
def test_greedy_tokens_are_a_finding_only_if_they_differ(say, agreement):
    factors, rows = inference()
    for scope, share in (("run_to_run", 1.0), ("batch", 1.0), ("decode", agreement)):
        rows += [
            exact("ulp_difference", 12.0, scope=scope),
            exact("greedy_agreement", share, scope=scope),
        ]
    found = [line for line in say("model", [(factors, rows)]) if "greedy" in line]
    # The comparison splits each of 3 sequences of 64 tokens in two.
    said = (
        "tiny (dense, float32), batch 6, 32 tokens: 25% of greedy tokens differ between prefill "
        "and decode: logits differ by at most 12 ULP."
    )
    assert found == [said] * (agreement < 1)


def test_every_time_of_generation_has_its_interval(say):
    cases = [
        inference(),
        model_case("generation", [timed("prefill", 4, 5, 6), timed("decode", 1, 2, 3)]),
    ]
    assert say("model", cases)[0] == (
        f"{TINY}: Inference takes 12.0 ms [11.0 … 15.0] and a generated token 2.00 ms "
        "[1.00 … 3.00]: the first token takes 5.00 ms [4.00 … 6.00]; inference reads 16,000 "
        "tokens/s [12,800 … 17,450]."
    )
