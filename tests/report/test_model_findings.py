"""No verdict on models and warm-up claims more than its intervals."""

import pytest

from nanolib.measurement import Measurement, exact
from tests.report.cases import inference, model_case, timed, warmup_process
from tests.report.rows import points
from tests.shown import CHARTS, VERDICTS

TINY = "tiny (dense, float32), batch 3, 64 tokens"


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((5, 6, 7), "2.00× [1.57 … 3.00] (inference, faster)"),
        ((5, 6, 11), "2.00× [1.00 … 3.00] (inference, no clear difference)"),
        ((16, 24, 25), "0.50× [0.44 … 0.94] (inference, slower)"),
    ],
)
def test_an_optimization_is_faster_or_slower_when_the_ranges_do_not_overlap(say, ends, said):
    shape = {"name": "tiny (compile)", "optimization": "compile"}
    shorter = [inference(1, 2, 3, seq_len=32), inference(1, 2, 3, seq_len=32, **shape)]
    lines = say("model", [inference(), inference(*ends, **shape), *shorter])
    assert [line for line in lines if "relative to" in line] == [
        f"{TINY.replace(' ', ' (compile) ', 1)}: The speed relative to eager float32 is {said}."
    ]


@pytest.mark.parametrize(
    ("needed", "ratio", "said"),
    [
        ([1, 2, 1, 1, 2], 1.06,
         "2 warm-up steps are enough for forward + backward: 5 processes need 1, 2, 1, 1, 2 steps. "
         "The steady step time is 10.2 ms."),
        ([1] * 5, 1.06, "1 warm-up step is enough for forward + backward: 5 processes need 1, 1, 1, 1, 1 steps"),
        ([1, None, 1, 1, None], 1.0,
         "The warm-up of forward + backward is unclear in 2 of 5 fresh processes: it never settles. "
         "The other processes need 1, 1, 1 steps. Next: increase curve_steps"),
        ([0] * 5, 1.04, "No warm-up step is needed for forward + backward: none of 5 fresh processes needs a"),
        ([0] * 4, 1.06, "No warm-up step is needed for forward + backward: none of 4 fresh processes needs a"),
        ([0] * 5, 1.06,
         "Use 5 warm-up steps for forward + backward: no curve shows warm-up, but the mean is 6% higher without "
         "warm-up. The steady step time is 10.2 ms. Next: repeat the run."),
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
    processes = [
        warmup_process("forward", at, {0: 12.0 * ratio, 2: 12.0, 5: 12.0})
        for at, ratio in enumerate(ratios)
    ]
    _, line = say("warmup", processes)
    assert line == f"{said}, the range over 5 processes, and a CV of 35%."


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


def _generation(batch, low, ms, high):
    rows = [timed("prefill", 1, 2, 3), timed("decode", low, ms, high)]
    rows.append(Measurement("tokens_per_second", 1e3 * batch / ms, scope="decode"))
    return model_case("generation", rows, batch_size=batch)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            (1.9, 2, 2.1),
            "Batch 4 decodes 4.00× [3.62 … 4.42] the tokens/s of batch 1, without the time to read "
            "the prompt: each user gets 500 instead of 500",
        ),
        (
            (7, 8, 9),
            "Batch 4 decodes 1.00× [0.844 … 1.20] the tokens/s of batch 1, without the time to read "
            "the prompt (no clear difference): each user",
        ),
    ],
)
def test_tokens_of_all_users_and_of_each_are_compared_and_drawn_over_the_batch(
    measured, ends, said
):
    cases = [inference(), _generation(1, 1.9, 2, 2.1), _generation(4, *ends)]
    rows = measured("model", cases)
    assert said in next(line for line in VERDICTS["model"](rows) if "Batch" in line)
    each = 1000 / ends[1]
    assert points(CHARTS["generation_batches"](rows), "panel", "x", "y") == [
        ("all users", 1, 500),
        ("all users", 4, 4 * each),
        ("each user", 1, 500),
        ("each user", 4, each),
    ]


@pytest.mark.parametrize("agreement", [1.0, 0.75])
def test_greedy_tokens_are_a_finding_only_if_they_differ(say, agreement):
    factors, rows = inference()
    for scope, share in (("run_to_run", 1.0), ("batch", 1.0), ("decode", agreement)):
        rows.append(exact("ulp_difference", 12.0, scope=scope))
        rows.append(exact("greedy_agreement", share, scope=scope))
    found = [line for line in say("model", [(factors, rows)]) if "greedy" in line]
    said = "25% of greedy tokens differ between prefill and decode: logits differ by at most 12 ULP"
    assert found == [f"{TINY}: {said}."] * (agreement < 1)
    sparse = [(factors | {"attention_type": "sparse"}, rows)]
    found = [line for line in say("model", sparse) if "greedy" in line]
    assert ["some sparse patterns keep other keys" in line for line in found] == [True] * (
        agreement < 1
    )
