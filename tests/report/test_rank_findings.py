"""No finding across ranks claims more than its intervals."""

import pytest

from nanolib.experiments.distributed.launch import Launch
from tests.report.cases import CORES, decode_cases, rank_case
from tests.report.rows import points
from tests.shown import CHARTS

FUSED = {"fused": (8, 9, 9.5)}


@pytest.mark.parametrize(
    ("ring", "said"),
    [
        ((9.6, 11, 13), "The fastest algorithm is fused, at 9.00 ms [8.00 … 9.50]."),
        (
            (9.5, 11, 13),
            "No clear difference between fused and ring: 9.00 ms [8.00 … 9.50] and "
            "11.0 ms [9.50 … 13.0] (the intervals overlap).",
        ),
    ],
)
def test_the_fastest_algorithm_across_ranks_overlaps_no_other(say, ring, said):
    faster = {"ring": (1, 2, 3)}
    cases = decode_cases({"gather": (10, 12, 30), "ring": ring} | FUSED, alone=(26, 27, 30))
    cases += decode_cases(faster, world=2) + decode_cases(faster, world=8, flags=CORES)
    assert say("distributed", cases)[0] == (
        "float32: Decoding over 4,096 keys is faster on 4 ranks than on one: "
        f"the speed-up is 3.00× [2.74 … 3.75], 75% [68% … 94%] of perfect scaling. {said}"
    )


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        ((9.4, 10, 11), "No clear difference between 2 ranks and one rank for decoding over 4,096 keys: "
                        "1.11× [0.989 … 1.38] (the intervals overlap). The only algorithm is fused"),
        ((5, 6, 7), "Decoding over 4,096 keys is slower on 2 ranks than on one: the speed-up is 0.667× [0.526 … 0.875]"),
        ((16, 17, 18), "Decoding over 4,096 keys is faster on 2 ranks than on one: the speed-up is 1.89× [1.68 … 2.25]"),
        (None, "Decoding over 4,096 keys on 2 ranks was not compared with one rank: The only"),
    ],
)  # fmt: skip
def test_whether_ranks_help_is_the_first_finding(say, alone, said):
    first, _ = say("distributed", decode_cases(FUSED, world=2, alone=alone))
    assert first.startswith(f"float32: {said}")


@pytest.mark.parametrize(
    ("cases", "why"),
    [
        (decode_cases(FUSED, flags=CORES), "the ranks need more cores than this machine has"),
        (
            [rank_case("dense", (8, 9, 9.5), world=1)],
            "only one rank was used. Next: set world_sizes",
        ),
    ],
)
def test_without_cores_or_several_ranks_no_scaling_is_claimed(say, cases, why):
    (line,) = say("distributed", cases)
    text = "float32: The scaling of decoding over 4,096 keys was not measured"
    assert line.startswith(f"{text}: {why}") and "fastest" not in line


def test_a_bar_per_part_of_tree_attention_and_one_for_the_wait(measured):
    """The calls of two ranks, of which the second is slower."""
    fast = {"comp_shard_kv": 1.0, "comm_sum_num": 2.0, "wait": 3.0}
    slow = {name: 2 * ms for name, ms in fast.items()}
    answers = [{"parts": {"fused": [ms] * 6}} for ms in (fast, slow)]
    shape, _ = rank_case("fused", (8, 9, 9.5), world=2)
    rows = measured("distributed", [(shape, [*Launch(answers).parts("fused")])])
    assert points(CHARTS["decode_shares"](rows), "series", "part", "x") == [
        ("shard kv", "compute", 2.0),
        ("sum num", "communication", 4.0),
        ("wait", "wait", 6.0),
    ]
