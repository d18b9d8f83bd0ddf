"""No verdict on attention claims more than its intervals: speed, rooflines, and what sparsity costs."""

import math

import pytest

from nanolib.measurement import Flag, Measurement, exact
from tests.report.cases import (
    CEILINGS,
    SHAPE,
    attention_case,
    rated,
)


@pytest.mark.parametrize(
    ("window", "random", "said"),
    [
        ((10.91, 12, 14), (11.5, 13, 20), "dense is the fastest forward: 10.0 ms [9.00 … 10.9]"),
        ((10.90, 12, 14), (11.5, 13, 20), "dense and window cannot be told apart forward: dense 10.0 ms"),
        ((10.91, 12, 14), (10.5, 13, 20), "dense and random cannot be told apart forward"),
        ((10.50, 12, 14), (10.5, 13, 20), "dense, window and random cannot be told apart forward"),
        ((8.000, 8.5, 8.99), (11.5, 13, 20), "window is the fastest forward"),
        ((8.000, 9.5, 9.60), (11.5, 13, 20), "window and dense cannot be told apart forward"),
        ((math.nan, 12, math.nan), (11.5, 13, 20), "dense and window cannot be told apart forward"),
    ],
)
def test_the_fastest_is_named_when_its_interval_overlaps_no_other(say, window, random, said):
    cases = [attention_case("dense", 9, 10, 10.9), attention_case("window", *window), attention_case("random", *random)]
    (line,) = (line for line in say("attention", cases) if "forward" in line)
    assert line.startswith(f"Non-causal, batch 3, float32: at 64 tokens {said}")
    assert ", at 37% of the machine's matrix-product ceiling." in line
    assert ("Next: a larger budget_s" in line) == ("told apart" in line)


def test_one_kind_alone_is_not_the_fastest_and_only_the_longest_tells_its_share_of_the_ceiling(say):
    cases = [attention_case("dense", 9, 10, 11), attention_case("window", 5, 6, 7)]
    alone = attention_case("dense", 20, 21, 22, seq_len=128)
    lines = [line for line in say("attention", [*cases, alone]) if "forward" in line]
    assert lines == ["Non-causal, batch 3, float32: at 64 tokens window is the fastest forward: 6.00 ms [5.00 … 7.00]."]
    assert "Only dense kinds were measured" in say("attention", [alone])[-1]


@pytest.mark.parametrize("same", [True, False])
def test_times_of_two_runs_or_devices_are_not_ranked(say, same):
    slow, fast = attention_case("dense", 9, 10, 11), attention_case("window", 5, 6, 7)
    assert any("fastest" in line for line in say("attention", [slow, fast]))
    if same:
        lines = say("attention", [slow], [fast])
    else:
        lines = say("attention", [slow, attention_case("window", 5, 6, 7, device="cuda:0")])
    assert not any("fastest" in line or "told apart" in line for line in lines)


def test_each_run_and_device_is_named_where_there_are_several(say):
    cases = [
        attention_case(name, *ms, device=device)
        for device in ("cpu", "cuda:0")
        for name, ms in (("dense", (9, 10, 11)), ("window", (5, 6, 7)))
    ]
    lines = say("attention", cases, cases)
    named = [line.partition(": at 64")[0] for line in lines if "fastest" in line]
    places = [f"run run-{at}-of, {device}" for at in (0, 1) for device in ("cpu", "cuda:0")]
    assert named == [f"Non-causal, batch 3, float32, {place}" for place in places]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            (8, 10, 12),
            "from 64 tokens on window is faster than dense: 2.00× [1.50 … 2.88] at 64 tokens, at most 4.00× possible",
        ),
        ((8, 17, 18), "at 64 tokens window and dense cannot be told apart: 1.18× [1.00 … 2.88] at"),
        ((22, 23, 24), "at 64 tokens window and dense cannot be told apart"),
        ((23, 24, 25), "at 64 tokens window and dense cannot be told apart"),
        ((23.1, 24, 25), "window is not faster than dense up to 64 tokens: 0.83× [0.72 … 1.00] at"),
    ],
)
def test_sparse_beats_dense_when_the_whole_range_of_its_speed_up_is_above_one(say, ends, said):
    cases = [attention_case("dense", 18, 20, 23), attention_case("window", *ends, tiles=0.75)]
    lines = say("attention", cases)
    assert sum("window is faster" in line or "not faster" in line or said in line for line in lines) == 1
    (line,) = (line for line in lines if said in line)
    assert line.endswith("; it removes 70% of the connections there.")


@pytest.mark.parametrize(
    ("wins", "said"),
    [
        ((64, 128, 256, 512), "from 64 tokens on window is faster than dense"),
        ((64, 256, 512), "from 256 tokens on window is faster than dense"),
        ((256,), "at 512 tokens window is slower than dense, though it is faster at 256:"),
        ((), "window is not faster than dense up to 512 tokens"),
    ],
)
def test_it_pays_from_the_length_on_from_which_it_wins_at_every_longer_one(say, wins, said):
    cases = []
    for seq_len in (512, 64, 256, 128):
        ms = 10 if seq_len in wins else 40
        cases.append(attention_case("dense", 18, 20, 23, seq_len=seq_len))
        cases.append(attention_case("window", ms - 1, ms, ms + 1, seq_len=seq_len, tiles=0.75))
    (line,) = (line for line in say("attention", cases) if "it removes 70%" in line)
    assert said in line and " at 512 tokens, at most" in line


def test_what_never_settled_is_counted(say):
    cases = [attention_case("dense", 9, 10, 11), attention_case("b", 5, 6, 7, flags=(Flag.NO_STEADY_STATE,))]
    said = "1 of 2 cases never settled: differences that rest on them say nothing."
    assert any(line.startswith(said) for line in say("attention", cases))
    assert not any("never settled" in line for line in say("attention", cases[:1]))


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((3e10, 5e10, 5.9e10), "dense n=64 comes nearest to its roof, 80% of 1e+11 FLOP/s."),
        ((3e10, 5e10, 6e10), "dense n=64 comes nearest to its roof (not told apart from 1 more), 80% of 1e+11 FLOP/s."),
    ],
)
def test_who_comes_nearest_to_its_roof_overlaps_no_other(say, second, said):
    cases = [
        *CEILINGS,
        rated("window", *second),
        rated("dense", 6e10, 8e10, 9e10),
        rated("b", 1e9, 2e9, 3e9, moved=1e6),
    ]
    (line,) = (line for line in say("attention", cases) if "Forward is bound" in line)
    assert line == f"Forward is bound by compute in 2 of 3 cases and memory in 1 of 3 cases: {said}"


@pytest.mark.parametrize(
    ("moved", "rate", "said"),
    [
        (1e5, 1.2e11, "120% of 1e+11 FLOP/s, which is above it: the ceiling was measured too low"),
        (1e6, 6e10, "150% of 4e+10 FLOP/s, which is above it: some of it stays in a cache"),
    ],
)
def test_why_a_kernel_can_lie_above_its_roof_is_said(say, moved, rate, said):
    cases = [*CEILINGS, rated("dense", 0.99 * rate, rate, 1.01 * rate, moved=moved), rated("b", 1e9, 2e9, 3e9)]
    (line,) = (line for line in say("attention", cases) if "Forward is bound" in line)
    assert said in line and ("nano doctor" in line) == (moved == 1e5)


def test_at_the_ridge_compute_is_the_bound_and_several_batches_are_named(say):
    cases = [*CEILINGS, rated("a", 6e10, 8e10, 9e10, 1e6, 1e5), rated("b", 1e9, 2e9, 3e9, 1e6, 1e5, batch_size=4)]
    (line,) = (line for line in say("attention", cases) if "Forward is bound" in line)
    assert line == (
        "Forward is bound by compute in 2 of 2 cases: a n=64 batch=3 comes nearest to its roof, 80% of 1e+11 FLOP/s."
    )


@pytest.mark.parametrize(
    ("tuned", "said"),
    [
        (
            (0.01, 0.3, 0.5),
            "costs loss, and the fine-tune does not take back all of it: ",
        ),
        ((0.0, 0.3, 0.5), "+0.300 [+0.000 … +0.500] nats per byte after both were trained on"),
        ((-0.5, -0.3, 0.0), "costs loss, and after a fine-tune these seeds show no difference: "),
        ((-0.5, -0.3, -0.01), "costs loss, and after a fine-tune it is lower than dense: "),
        (None, "removes 90%, costs loss: "),
    ],
)
def test_what_a_pattern_costs_after_training_on_is_held_against_zero(say, tuned, said):
    def case(target, replaced):
        found = [exact("sparsity", target, method="mask"), Measurement("loss", 2.0, 1.9, 2.1, 0.95, 5, scope="dense")]
        found.append(
            Measurement("loss_difference", replaced, replaced - 0.1, replaced + 0.2, 0.95, 5, scope="replaced")
        )
        if tuned:
            ends = dict(zip(("low", "estimate", "high"), tuned, strict=True))
            found.append(Measurement("loss_difference", **ends, confidence=0.95, n=5, scope="fine_tuned"))
        return SHAPE | {"name": f"w {target}", "pattern": "window", "target": target, "seeds": 5}, found

    lines = say("attention", [case(0.9, 0.6), case(0.5, 0.2), attention_case("dense", 9, 10, 11)])
    (line,) = (line for line in lines if "trained decoder" in line)
    assert (
        "+0.600 [+0.500 … +0.800] nats per byte on a loss of 2.00" in line
        and said in line
        and line.endswith("; 5 seeds.")
    )
