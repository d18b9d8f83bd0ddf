"""No finding across ranks claims more than its intervals."""

import pytest

from nanolib.experiments.distributed.launch import Launch
from tests.report.cases import COMPUTING, CORES, decode_case
from tests.report.rows import points
from tests.shown import CHARTS

FUSED = {"fused": ((8, 9, 9.5), COMPUTING)}


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
    others = {"gather": ((10, 12, 30), COMPUTING), "ring": (ring, COMPUTING)}
    faster = {"ring": ((1, 2, 3), COMPUTING)}
    cases = [
        decode_case(faster, world=1),
        decode_case(others | FUSED, alone=(26, 27, 30)),
        decode_case(faster, world=2),
        decode_case(faster, world=8, flags=CORES),
    ]
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
    first, _ = say("distributed", [decode_case(FUSED, world=2, alone=alone)])
    assert first.startswith(f"float32: {said}")


def test_the_parts_of_a_token_are_listed_without_an_order(say):
    parts = [(1, 1.5, 1.9), (0.3, 1, 1.6), (1.7, 3, 4)]
    line = say("distributed", [decode_case({"fused": ((8, 9, 9.5), parts)})])[1]
    assert line == (
        "float32: A decoded token at 4,096 keys on 4 ranks has three parts: compute 1.50 ms "
        "[1.00 … 1.90], wait 1.00 ms [0.300 … 1.60], communication 3.00 ms [1.70 … 4.00]."
    )


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"flags": CORES}, "the ranks need more cores than this machine has"),
        ({"world": 1}, "only one rank was used. Next: set world_sizes"),
    ],
)
def test_without_cores_or_several_ranks_no_scaling_is_claimed(say, shape, why):
    algorithms = FUSED | {"ring": ((18, 19, 20), COMPUTING)}
    (line,) = say("distributed", [decode_case(algorithms, **shape)])
    text = "float32: The scaling of decoding over 4,096 keys was not measured"
    assert line.startswith(f"{text}: {why}") and "fastest" not in line


def test_at_most_five_findings_speak_of_the_longest_sequences(say):
    cases = [
        decode_case(FUSED, alone=(26, 27, 30), seq_len=n, dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
        for n in (64, 4096)
    ]
    scaling, more, parts = say("distributed", cases)
    assert scaling.startswith("bfloat16: Decoding over 4,096 keys is faster on 4 ranks")
    assert more.startswith("float16: Decoding over 4,096 keys is faster on 4 ranks")
    assert parts.startswith("bfloat16: A decoded token at 4,096 keys on 4 ranks")


def test_a_bar_per_part_of_tree_attention_and_one_for_the_wait(measured):
    """The calls of two ranks, of which the second is slower."""
    fast = {"comp_shard_kv": 1.0, "comm_sum_num": 2.0, "wait": 3.0}
    slow = {name: 2 * ms for name, ms in fast.items()}
    answers = [{"parts": {"fused": [ms] * 6}, "errors": {}} for ms in (fast, slow)]
    shape, _ = decode_case(FUSED, world=2)
    rows = measured("distributed", [(shape, [*Launch(answers).algorithm("fused", None)])])
    assert points(CHARTS["decode_shares"](rows), "series", "part", "x") == [
        ("shard kv", "compute", 2.0),
        ("sum num", "communication", 4.0),
        ("wait", "wait", 6.0),
    ]
