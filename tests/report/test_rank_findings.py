"""No finding across ranks claims more than its intervals."""

import pytest

from nanolib.experiments.distributed.launch import Launch
from tests.report.cases import CORES, decode_cases, rank_case
from tests.report.rows import points
from tests.shown import CHARTS, VERDICTS

FUSED = {"fused": (8, 9, 9.5)}


@pytest.mark.parametrize(
    ("ring", "said"),
    [
        ((9.6, 11, 13), "fused is the fastest algorithm {}: 9.00 ms [8.00 … 9.50]."),
        (
            (9.5, 11, 13),
            "No clear difference between fused and ring {}: 9.00 ms [8.00 … 9.50] and "
            "11.0 ms [9.50 … 13.0] (the intervals overlap). Next: increase budget_s.",
        ),
    ],
)
def test_the_fastest_algorithm_across_ranks_overlaps_no_other(say, ring, said):
    faster = {"ring": (1, 2, 3)}
    cases = decode_cases({"gather": (10, 12, 30), "ring": ring} | FUSED, alone=(26, 27, 30))
    cases += decode_cases(faster, world=2) + decode_cases(faster, world=8, flags=CORES)
    first, _, fastest = say("distributed", cases)
    assert first == (
        "float32: fused on 4 ranks is faster than one rank for decoding over 4,096 keys: "
        "3.00× [2.74 … 3.75], 75% [68% … 94%] of perfect scaling; a call takes 9.00 ms "
        "[8.00 … 9.50]."
    )
    assert fastest == f"float32: {said.format('for decoding over 4,096 keys on 4 ranks')}"


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        ((9.4, 10, 11), "No clear difference between fused on 2 ranks and one rank for decoding "
                        "over 4,096 keys: 1.11× [0.989 … 1.38] (the intervals overlap), 56% ["),
        ((5, 6, 7), "fused on 2 ranks is slower than one rank for decoding over 4,096 keys: "
                    "0.667× [0.526 … 0.875]"),
        (None, "fused on 2 ranks was not compared with one rank for decoding over 4,096 keys: "
               "a call"),
    ],
)  # fmt: skip
def test_whether_ranks_help_is_the_first_finding(say, alone, said):
    first, _ = say("distributed", decode_cases(FUSED, world=2, alone=alone))
    assert first.startswith(f"float32: {said}")


@pytest.mark.parametrize(
    "cases", [decode_cases(FUSED, flags=CORES), [rank_case("dense", (8, 9, 9.5), world=1)]]
)
def test_without_cores_or_several_ranks_no_scaling_is_claimed(say, cases):
    (line,) = say("distributed", cases)
    text = "float32: The scaling of decoding over 4,096 keys was not measured: no algorithm ran on"
    assert line.startswith(text) and "fastest" not in line


def test_a_bar_per_part_of_tree_attention_and_one_for_the_wait_in_the_newest_run(measured):
    """The calls of two ranks, of which the second is slower."""
    fast = {"comp_shard_kv": 1.0, "comp_num_den": 0.5, "comm_sum_num": 2.0, "wait": 3.0}

    def run(slower):
        slow = {name: slower * ms for name, ms in fast.items()}
        answers = [{"parts": {"fused": [ms] * 6}} for ms in (fast, slow)]
        shape, _ = rank_case("fused", (8, 9, 9.5), world=2)
        return [(shape, [*Launch(answers).parts("fused")])]

    rows = measured("distributed", run(1.5), run(2))
    assert points(CHARTS["decode_shares"](rows), "series", "part", "x", "text") == [
        ("shard kv", "compute", 2.0, "2 ms"),
        ("num den", "compute", 1.0, "1 ms"),
        ("sum num", "communication", 4.0, "4 ms"),
        ("wait", "wait", 6.0, "6 ms"),
    ]


def test_the_algorithm_that_is_compared_with_one_rank_is_the_one_that_is_fastest(measured):
    """By its estimate `gather` is faster, but in the rounds of both it was slower than `fused`."""
    cases = decode_cases({"gather": (8, 8.5, 9), "fused": (9, 9.2, 9.4)}, alone=(26, 27, 30))
    rows = measured("distributed", cases)
    for other, ends in (("fused", (0.8, 0.9, 0.95)), ("gather", (1.05, 1.1, 1.25))):
        rows.loc[rows["scope"] == f"decode over {other}", ["low", "estimate", "high"]] = ends
    scaling, _, fastest = VERDICTS["distributed"](rows)
    assert scaling.startswith("float32: fused on 4 ranks is faster than one rank")
    assert fastest.startswith("float32: fused is the fastest algorithm")
