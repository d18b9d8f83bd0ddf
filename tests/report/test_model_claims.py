"""No verdict on models and warm-up claims more than its intervals."""

import pytest

from nanolib.measurement import Measurement
from tests.report.cases import (
    inference,
    model_case,
    timed,
    training,
)


def test_a_model_is_told_with_its_batch_its_tail_and_its_ratios(say):
    generation = [timed("prefill", 19, 20, 22), timed("decode", 1.9, 2, 2.5, predicted=0.5)]
    generation.append(Measurement("tokens_per_second", 1500.0, scope="decode"))
    generation.append(Measurement("tokens_per_second", 9600.0, scope="prefill"))
    longest = {"seq_len": 128}
    step = training([(9, 10, 11), (19, 20, 21), (5, 6, 7)], **longest)
    cases = [inference(**longest), step, model_case("generation", generation, **longest), inference(1, 2, 3)]
    shape = "tiny (dense, float32), batch 3, n = 128"
    first, second, *_ = say("model", cases)
    assert first == (
        f"{shape}: inference takes 12.0 ms [11.0 … 15.0], a generated token 2.00 ms [1.90 … 2.50] and a training step 36.0 ms "
        "[35.0 … 39.0]: inference 16,000 tokens/s, 3.0× the time that the roofline predicts; "
        "the first token after 20.0 ms [19.0 … 22.0], then p99 6 ms, 1,500 tokens/s, 4.0× the time that the roofline predicts; "
        "training 3.0× inference (3× is what the FLOPs say), 60 MiB at its peak, 12.0× the weights; "
        "the backward (20 ms) is the largest part."
    )
    assert "takes" not in second  # one sentence for each model


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        ([(9, 10, 11), (12, 20, 21), (5, 6, 7)], "the backward (20 ms) is the largest part"),
        ([(9, 10, 12), (12, 20, 21), (5, 6, 7)],
         "the backward (20 ms) and the forward (10 ms) cannot be told apart as the largest part"),
        ([(5, 6, 7), (9, 10, 11), (12, 20, 21)], "the optimizer step (20 ms) is the largest part"),
    ],
)  # fmt: skip
def test_the_largest_phase_is_named_when_its_interval_is_above_the_others(say, phases, said):
    text = " ".join(say("model", [inference(), training(phases)]))
    assert f"; {said}." in text


@pytest.mark.parametrize(
    ("ends", "memory", "said"),
    [
        ((5, 6, 7), 8.0, "inference 2.00× [1.57 … 3.00] as fast (faster)"),
        ((5, 6, 11), 8.0, "inference 2.00× [1.00 … 3.00] as fast (not told apart)"),
        ((15, 24, 25), 8.0, "inference 0.50× [0.44 … 1.00] as fast (not told apart)"),
        ((16, 24, 25), 8.0, "inference 0.50× [0.44 … 0.94] as fast (slower)"),
        ((5, 6, 7), 8.03, "inference 2.00× [1.57 … 3.00] as fast (faster)"),
        ((5, 6, 7), 8.05, "inference 2.00× [1.57 … 3.00] as fast (faster), inference peak 1.01×"),
        ((5, 6, 7), 4.0, "inference 2.00× [1.57 … 3.00] as fast (faster), inference peak 0.50×"),
    ],
)
def test_an_optimisation_is_faster_or_slower_when_the_ranges_do_not_overlap(say, ends, memory, said):
    shape = {"name": "tiny (compile)", "optimisation": "compile"}
    cases = [inference(), inference(*ends, memory=memory, **shape), inference(1, 2, 3, seq_len=32)]
    cases.append(inference(1, 2, 3, seq_len=32, **shape))
    lines = [line for line in say("model", cases) if "against eager" in line]
    assert lines == [f"tiny (compile), n = 64, against eager: {said}."]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_how_many_warm_up_steps_are_enough(say, steps):
    curve = {"direction": "forward_backward", "warmup_steps": 0, "curve": True}
    needed = Measurement("warmup_needed", float(steps), scope="forward_backward", details={"steady_median": 10.25})
    words = ["no warm-up was detected", "1 warm-up step is enough", "2 warm-up steps are enough"][steps]
    line = say("warmup", [(curve, [needed])])[0]
    assert line == f"forward + backward: {words} in this one fresh process: a step then takes 10.2 ms."


@pytest.mark.parametrize(
    ("warm", "said"),
    [((9, 10, 10.9), "is +50% against that after 5"), ((9, 10, 14), "cannot be told from that after 5")],
)
def test_what_no_warm_up_does_to_the_mean_and_to_the_median_are_told_apart(say, warm, said):
    def case(direction, steps, ends, mean):
        factors = {"direction": direction, "warmup_steps": steps, "curve": False}
        return factors, [timed(direction, *ends, details={"mean": mean, "sd": 3.0, "cv": 0.33})]

    cases = [case("forward", 0, (14, 15, 17), 30.0), case("forward", 5, warm, 12.0), case("forward", 2, warm, 12.0)]
    cases.append(case("forward_backward", 0, (1, 2, 3), 70.0))  # without its own five steps nothing is said of it
    needed = Measurement("warmup_needed", scope="forward", message="it never settles", details={})
    curve = ({"direction": "forward", "warmup_steps": 0, "curve": True}, [needed])
    unclear, *lines = [line for line in say("warmup", [curve, *cases]) if "Fresh" not in line]
    assert unclear.startswith("forward: no clear answer: it never settles. Next: raise curve_steps, or repeat")
    assert lines == [
        "forward: without warm-up the mean is +150% against that after 5 steps, with a CV of 33%: "
        f"the median, 15 ms, {said}."
    ]
