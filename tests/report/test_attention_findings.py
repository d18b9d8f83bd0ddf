"""No finding on attention claims more than its intervals: speed, rooflines, and loss."""

import math
from dataclasses import replace

import pytest

from nanolib.experiments.attention.findings import attention_table
from nanolib.measurement import exact
from tests.report.cases import attention_case, quality_case, timed
from tests.shown import CHARTS

ABOUT = "Non-causal, batch 3, float32"


def _line(lines, words):
    """The only line that has some words."""
    (line,) = (line for line in lines if words in line)
    return line


def test_only_lengths_that_were_measured_are_claimed(say):
    cases = []
    for n, ms in ((512, 10), (64, 10), (256, 10), (128, 40)):
        cases.append(attention_case("dense", 18, 20, 23, seq_len=n))
        cases.append(attention_case("window", ms - 1, ms, ms + 1, seq_len=n, tiles=0.75))
    first = say("attention", cases)[0]
    assert "is faster than every dense kernel at 64, 256 and 512 tokens: " in first
    assert first.endswith(". Dense attention is faster than sparse attention at 128 tokens.")


@pytest.mark.parametrize(
    ("ends", "answer", "ratio"),
    [
        ((12, 13, 14), "Dense attention is faster than sparse attention", "0.769× [0.643 … 0.917]"),
        ((4.9, 5, 5.1), "Sparse attention is faster than every dense kernel",
         "2.00× [1.76 … 2.24]"),
        ((9.5, 10.5, 11.5), "No clear difference between sparse and dense attention",
         "0.952× [0.783 … 1.16]"),
    ],
)  # fmt: skip
def test_faster_than_dense_is_faster_than_every_dense_kernel_and_the_smallest_ratio_is_shown(
    say, ends, answer, ratio
):
    window = attention_case("window", *ends)
    dense = [attention_case("dense (flash)", 19, 20, 21), attention_case("dense (math)", 9, 10, 11)]
    first = say("attention", [*dense, window])[0]
    ratio = f"window (sparsity 70%) is {ratio} as fast as dense (math)"
    assert first.startswith(f"{ABOUT}: {answer} at 64 tokens: {ratio} at 64 tokens")
    dense.append(attention_case("flash_attn", 4, 4.1, 4.2))
    assert "as fast as flash_attn" in say("attention", [*dense, window])[0]


@pytest.mark.parametrize(
    ("kept", "compile_ms", "said"),
    [
        (True, 0, "or 2.00× [1.83 … 2.19] in the first call, which includes building the mask."),
        (True, 10, "or 1.00× [0.913 … 1.09] in the first call, which includes building the mask and"
                   " compiling."),
        (False, 0, "as fast as dense at 64 tokens, including the time to build a mask in each "
                   "call."),
    ],
)  # fmt: skip
def test_a_mask_that_is_built_once_is_told_with_its_time_and_with_the_ratio_that_includes_it(
    say, kept, compile_ms, said
):
    factors, found = attention_case("window", 4.9, 5, 5.1, tiles=0.9)
    found.append(timed("mask", 4.9, 5, 5.1, details={"kept": kept}))
    found.append(timed("compile", math.nan, compile_ms, math.nan))
    first = say("attention", [attention_case("dense", 19, 20, 21), (factors, found)])[0]
    assert "is 4.00× [3.73 … 4.29] as fast as dense" in first and first.endswith(said)


def test_the_best_case_of_each_pass_is_compared_with_the_roofline(say):
    cases = []
    for n, bound_ms, share in ((64, 5.0, 0.5), (4096, 8.0, 0.4)):  # the FLOPs take 5 ms and 4 ms
        factors, (latency, *found) = attention_case("dense", 9, 10, 11, seq_len=n)
        found += [replace(latency, predicted=bound_ms), exact("mfu", share, scope="forward")]
        found.append(timed("forward, cold", 90, 100, 110, predicted=8.0))  # it has no MFU
        cases.append((factors, found))
    assert _line(say("attention", cases), "roofline") == (
        "Forward is compute-bound in 1 of 2 cases and memory-bound in 1 of 2 cases: "
        "dense reaches 80% [73% … 89%] of the roofline at 4,096 tokens."
    )


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ((0.5, 0.6, 0.8), "increases the loss: 0.600 [0.500 … 0.800]"),
        ((-0.5, -0.3, 0.0), "makes no clear difference to the loss: -0.300 [-0.500 … 0]"),
    ],
)
def test_what_the_sparsest_mask_of_a_pattern_costs_is_compared_with_zero(say, ends, said):
    cases = [quality_case(0.9, ends), quality_case(0.5, (0, 0.1, 1))]
    lines = say("attention", [*cases, attention_case("dense", 9, 10, 11)])
    assert _line(lines, "trained decoder") == (
        f"In a trained decoder, window (90% sparse) {said} nats/byte with 5 seeds, "
        "and the dense loss is 2.00."
    )


def test_each_run_is_named_where_there_are_several(say):
    cases = [attention_case("dense", 9, 10, 11), attention_case("window", 5, 6, 7)]
    lines = say("attention", cases, cases)
    assert [line.partition(": Sparse")[0] for line in lines[:2]] == [
        f"{ABOUT}, run run-{at}-of" for at in (0, 1)
    ]


def test_a_mask_that_removes_nothing_is_not_compared(say, measured):
    cases = [attention_case("dense", 9, 10, 11), attention_case("window", 4, 5, 6, sparsity=0.0)]
    answer = "Sparse attention was not compared with dense attention: no mask that removes pairs"
    assert say("attention", cases)[0].startswith(answer)
    assert say("attention", [attention_case("window", 4, 5, 6)])[0].startswith(answer)
    rows = measured("attention", cases)
    drawn = str(CHARTS["attention_speed_up"](rows).to_dict())
    assert "no case has this result" in drawn
    assert list(attention_table(rows)["state"]) == ["ok", "mask removes no pairs"]


def test_the_fastest_dense_kernel_is_that_of_the_longest_sequence(say):
    cases = [attention_case("dense (flash)", 9, 10, 11, seq_len=n) for n in (64, 128)]
    cases += [attention_case("dense (math)", 19, 20, 21, seq_len=n) for n in (64, 128)]
    assert _line(say("attention", cases), "the fastest") == (
        f"{ABOUT}: dense (flash) is the fastest dense kernel at 128 tokens: 10.0 ms [9.00 … 11.0]."
    )


def test_a_speed_up_is_bounded_by_the_tiles_that_dense_attention_computes(measured):
    cases = [attention_case("dense", 9, 10, 11, tiles=0.4)]
    cases.append(attention_case("window", 4, 5, 6, tiles=0.9))
    table = attention_table(measured("attention", cases)).set_index("name")
    assert table.loc["window", "bound"] == pytest.approx(6) and table.loc["dense", "bound"] == 1
    assert (table.loc["window", "shape"], table.loc["window", "speed_up"]) == ("3, float32", 2)
