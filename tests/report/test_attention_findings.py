"""No finding on attention claims more than its intervals: speed, rooflines, and loss."""

import math
import re

import pytest

from tests.report.cases import (
    CEILINGS,
    attention_case,
    quality_case,
    rated,
    timed,
)


@pytest.mark.parametrize(
    ("math_ms", "flash_ms", "said"),
    [
        (
            (10.91, 12, 14),
            (11.5, 13, 20),
            "dense is the fastest dense kernel at 64 tokens: 10.0 ms [9.00 … 10.9].",
        ),
        (
            (10.89, 12, 14),
            (11.5, 13, 20),
            "No clear difference between dense and dense (math) at 64 tokens: "
            "10.0 ms [9.00 … 10.9] and 12.0 ms [10.9 … 14.0] (the intervals overlap).",
        ),
        (
            (8.000, 8.5, 8.99),
            (11.5, 13, 20),
            "dense (math) is the fastest dense kernel at 64 tokens",
        ),
        (
            (math.nan, 12, math.nan),
            (11.5, 13, 20),
            "No clear difference between dense and dense (math) at 64 tokens",
        ),
    ],
)
def test_a_dense_kernel_is_the_fastest_where_it_gains_over_each_other(say, math_ms, flash_ms, said):
    times = {
        "dense": (9, 10, 10.9),
        "dense (math)": math_ms,
        "dense (flash)": flash_ms,
        "window": (1, 2, 3),
    }
    cases = [attention_case(name, *ms) for name, ms in times.items()]
    (line,) = (
        line
        for line in say("attention", cases)
        if " fastest dense kernel " in line or " between dense " in line
    )
    assert line.startswith(f"Non-causal, batch 3, float32: {said}")
    assert ("Next: increase budget_s" in line) == ("No clear difference" in line)


def test_without_a_sparse_kind_the_first_sentence_says_so(say):
    lines = say(
        "attention",
        [attention_case("dense (flash)", 9, 10, 11), attention_case("dense (math)", 19, 20, 21)],
    )
    assert lines[0].startswith(
        "Sparse attention was not measured: only dense kernels were measured. Next: add {kind"
    )
    assert "dense (flash) is the fastest dense kernel" in lines[1]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((8, 10, 12), "Sparse attention is faster than every dense kernel at 64 tokens: window (sparsity 70%) "
                      "is 2.00× [1.50 … 2.88] as fast as dense at 64 tokens."),
        ((8, 17, 18), "No clear difference between sparse and dense attention at 64 tokens: window (sparsity 70%) "
                      "is 1.18× [1.00 … 2.88] as fast as dense at 64 tokens (the intervals overlap)."),

        ((23.1, 24, 25), "Dense attention is faster than sparse attention at 64 tokens: window (sparsity 70%) "
                         "is 0.833× [0.720 … 0.996] as fast as dense at 64 tokens."),
    ],
)  # fmt: skip
def test_the_first_sentence_answers_the_question(say, ends, said):
    first = say(
        "attention",
        [attention_case("dense", 18, 20, 23), attention_case("window", *ends, tiles=0.75)],
    )[0]
    assert first.startswith(f"Non-causal, batch 3, float32: {said}")


def test_only_lengths_that_were_measured_are_claimed(say):
    cases = []
    for seq_len in (512, 64, 256, 128):
        ms = 40 if seq_len == 128 else 10
        cases.append(attention_case("dense", 18, 20, 23, seq_len=seq_len))
        cases.append(attention_case("window", ms - 1, ms, ms + 1, seq_len=seq_len, tiles=0.75))
    first = say("attention", cases)[0]
    assert "is faster than every dense kernel at 64, 256 and 512 tokens: " in first
    assert first.endswith(". Dense attention is faster than sparse attention at 128 tokens.")


def test_faster_than_dense_is_faster_than_every_dense_kernel_and_the_smallest_ratio_is_shown(say):
    dense = [attention_case("dense (flash)", 19, 20, 21), attention_case("dense (math)", 9, 10, 11)]
    slower = say("attention", [*dense, attention_case("window", 12, 13, 14)])[0]
    every = "every dense kernel at 64 tokens"
    assert "Dense attention is faster than sparse attention at 64 tokens" in slower
    assert "is 0.769× [0.643 … 0.917] as fast as dense (math)" in slower
    faster = say("attention", [*dense, attention_case("window", 4.9, 5, 5.1)])[0]
    assert (
        f"Sparse attention is faster than {every}" in faster
        and "is 2.00× [1.76 … 2.24] as fast as dense (math)" in faster
    )
    unclear = say("attention", [*dense, attention_case("window", 9.5, 10.5, 11.5)])[0]
    assert "No clear difference between sparse and dense attention" in unclear
    package = [attention_case("flash_attn", 4, 4.1, 4.2), *dense]
    assert (
        "as fast as flash_attn"
        in say("attention", [*package, attention_case("window", 4.9, 5, 5.1)])[0]
    )


@pytest.mark.parametrize("kept", [True, False])
def test_a_mask_that_is_built_once_is_told_with_its_time_and_with_the_ratio_that_includes_it(
    say, kept
):
    factors, found = attention_case("window", 4.9, 5, 5.1, tiles=0.9)
    found.append(timed("mask", 4.9, 5, 5.1, details={"kept": kept}))
    first = say("attention", [attention_case("dense", 19, 20, 21), (factors, found)])[0]
    assert "is 4.00× [3.73 … 4.29] as fast as dense" in first
    if kept:
        assert "or 2.00× [1.83 … 2.19] in the first call, which includes building the mask" in first
    else:  # each call chooses it, within its own time
        assert "including the mask, which each call chooses." in first and "first call" not in first


def test_the_ends_of_a_ratio_that_includes_a_long_compile_are_in_order(say):
    """As on an H200, where four seconds of compiling stand before a forward pass of a sixth of a millisecond."""
    factors, found = attention_case("window", 4.9, 5, 5.1, tiles=0.9)
    found += [timed("mask", 6.9, 7, 7.2), timed("compile", math.nan, 3800, math.nan)]
    first = say("attention", [attention_case("dense", 4.1, 4.2, 4.3), (factors, found)])[0]
    low, high = map(
        float,
        re.search(
            r"or \S+× \[([0-9.e-]+) … ([0-9.e-]+)\] in the first call, .* the mask and compiling",
            first,
        ).groups(),
    )
    assert low < high


def test_the_case_with_the_largest_share_of_its_roofline_is_named(say):
    cases = [
        *CEILINGS,
        rated("window", 3e10, 5e10, 6e10),
        rated("dense", 6e10, 8e10, 9e10),
        rated("b", 1e9, 2e9, 3e9, moved=1e6),
    ]
    (line,) = (line for line in say("attention", cases) if "Forward is compute" in line)
    assert line == (
        "Forward is compute-bound in 2 of 3 cases and memory-bound in 1 of 3 cases: "
        "dense seq_len=64 reaches 80% [60% … 90%] of the roofline's 100 GFLOP/s."
    )


@pytest.mark.parametrize(
    ("moved", "rate", "said"),
    [
        (
            1e5,
            1.2e11,
            "reaches 120 GFLOP/s, above the roofline's 100 GFLOP/s: the measured peak rate",
        ),
        (1e6, 6e10, "reaches 60 GFLOP/s, above the roofline's 40 GFLOP/s: part of the data stays"),
    ],
)
def test_why_a_kernel_can_lie_above_its_roof_is_said(say, moved, rate, said):
    cases = [
        *CEILINGS,
        rated("dense", 0.99 * rate, rate, 1.01 * rate, moved=moved),
        rated("b", 1e9, 2e9, 3e9),
    ]
    (line,) = (line for line in say("attention", cases) if line.startswith("Forward is"))
    assert said in line and ("nano doctor" in line) == (moved == 1e5)


@pytest.mark.parametrize(
    ("tuned", "said"),
    [
        (
            (0.01, 0.3, 0.5),
            "increases the loss, and after a fine-tune it increases the loss: +0.600 [+0.500 … +0.800] "
            "and +0.300 [+0.010 … +0.500] nats/byte",
        ),
        (
            (-0.5, -0.3, 0.0),
            "increases the loss, and after a fine-tune it makes no clear difference to the loss: ",
        ),
        (None, "window (90% sparse) increases the loss: "),
    ],
)
def test_what_a_pattern_costs_after_training_on_is_held_against_zero(say, tuned, said):
    losses = {"replaced": (0.5, 0.6, 0.8)} | ({"fine_tuned": tuned} if tuned else {})
    better = quality_case(0.5, losses | {"replaced": (0.1, 0.2, 0.4)})
    cases = [quality_case(0.9, losses), better, attention_case("dense", 9, 10, 11)]
    lines = say("attention", cases)
    (line,) = (line for line in lines if "trained decoder" in line)
    assert (
        "+0.600 [+0.500 … +0.800]" in line
        and said in line
        and line.endswith(" nats/byte with 5 seeds, and the dense loss is 2.00.")
    )


def test_each_run_and_device_is_named_where_there_are_several(say):
    ends = {"dense": (9, 10, 11), "window": (5, 6, 7)}
    cases = [
        attention_case(name, *ms, device=device)
        for device in ("cpu", "cuda:0")
        for name, ms in ends.items()
    ]
    named = [
        line.partition(": Sparse")[0]
        for line in say("attention", cases, cases)
        if "is faster than every dense kernel at" in line
    ]
    places = [f"run run-{at}-of, {device}" for at in (0, 1) for device in ("cpu", "cuda:0")]
    assert named == [f"Non-causal, batch 3, float32, {place}" for place in places]
