"""No finding across ranks claims more than its intervals."""

import pytest

from nanolib.experiments.distributed.launch import Launch
from nanolib.experiments.distributed.tables import decode_table
from nanolib.measurement import exact
from tests.report.cases import COMPUTING, CORES, decode_case, timed
from tests.shown import CHARTS


@pytest.mark.parametrize(
    ("ring", "gather", "said"),
    [
        ((9.6, 11, 13), (10, 12, 30), "The fastest algorithm is fused, at 9.00 ms [8.00 … 9.50]."),
        (
            (9.5, 11, 13),
            (10, 12, 30),
            "No clear difference between fused and ring: 9.00 ms [8.00 … 9.50] and "
            "11.0 ms [9.50 … 13.0] (the intervals overlap).",
        ),
    ],
)
def test_the_fastest_algorithm_across_ranks_overlaps_no_other(say, ring, gather, said):
    algorithms = {
        "gather": (gather, 1, COMPUTING),
        "ring": (ring, 3, COMPUTING),
        "fused": ((8, 9, 9.5), 2, COMPUTING),
    }
    alone = decode_case({"fused": ((1, 2, 3), 0, COMPUTING)}, world=1)
    fewer = decode_case({"ring": ((1, 2, 3), 2, COMPUTING)}, world=2)
    crowded = decode_case({"ring": ((1, 2, 3), 2, COMPUTING)}, world=8, flags=(CORES,))
    cases = [alone, decode_case(algorithms, alone=(26, 27, 30)), fewer, crowded]
    assert say("distributed", cases)[0] == (
        "float32: Decoding over 4,096 keys is faster on 4 ranks than on one: "
        f"the speed-up is 3.00× [2.74 … 3.75], 75% [68% … 94%] of perfect scaling. {said}"
    )


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (
            (9.6, 10, 11),
            "Decoding over 4,096 keys is faster on 2 ranks than on one: 1.11× [1.01 … 1.38], 56%",
        ),
        (
            (9.4, 10, 11),
            "No clear difference between 2 ranks and one rank for decoding over 4,096 keys: "
            "1.11× [0.989 … 1.38] (the intervals overlap). The only algorithm is fused",
        ),
        (
            (5, 6, 7),
            "Decoding over 4,096 keys is slower on 2 ranks than on one: 0.667× [0.526 … 0.875]",
        ),
        (None, "Decoding over 4,096 keys on 2 ranks was not compared with one rank: The only"),
    ],
)
def test_whether_ranks_help_is_the_first_finding(say, one, said):
    cases = [decode_case({"fused": ((8, 9, 9.5), 2, COMPUTING)}, world=2, alone=one)]
    assert say("distributed", cases)[0].startswith(f"float32: {said}")


PARTS = [
    [(3.1, 5, 6), (1, 1.2, 1.4), (1, 1.3, 1.6)],
    [
        (2.9, 5, 6),
        (0.5, 0.8, 1.4),
        (1, 1.3, 1.6),
    ],  # 70 % of it is computing, and the intervals meet
    [(1, 1.5, 1.9), (1.7, 3, 4), (0.3, 1, 1.6)],
    [(1, 1.5, 1.9), (0.5, 1, 1.6), (1.5, 3, 4)],
    [(1, 1.5, 1.9), (0.3, 1, 1.6), (1.7, 3, 4)],
]


@pytest.mark.parametrize(
    ("parts", "kind", "answer"),
    [
        (PARTS[0], "compute", "Decoding is compute-bound"),
        (PARTS[1], "unclear", "No clear difference between computing, waiting and communicating"),
        (PARTS[2], "wait", "Decoding is limited by waiting"),
        (PARTS[3], "unclear", "No clear difference between computing, waiting and communicating"),
        (PARTS[4], "communication", "Decoding is communication-bound"),
    ],
)
def test_the_table_the_chart_and_the_sentence_name_the_same_limit(
    say, measured, parts, kind, answer
):
    case = decode_case({"fused": ((8, 9, 9.5), 2, parts)})
    rows = measured("distributed", [case])
    assert list(decode_table(rows)["binds"]) == [kind]
    spec = CHARTS["decode_scaling"](rows).to_dict()
    drawn = {line["note"] for data in spec["datasets"].values() for line in data if "note" in line}
    assert drawn == {f"limited by {kind}"}
    line = say("distributed", [case])[1]
    assert line.startswith(f"float32: {answer} at 4,096 keys on 4 ranks: compute ")


def test_without_cores_or_several_ranks_no_scaling_is_claimed(say):
    algorithms = {"fused": ((8, 9, 9.5), 2, COMPUTING), "ring": ((18, 19, 20), 2, COMPUTING)}
    for case, why in (
        (
            decode_case(algorithms, flags=(CORES,)),
            "the ranks need more cores than this machine has",
        ),
        (decode_case(algorithms, world=1), "only one rank was used. Next: set world_sizes"),
    ):
        (line,) = say("distributed", [case])
        text = "float32: The scaling of decoding over 4,096 keys was not measured"
        assert line.startswith(f"{text}: {why}") and "fastest" not in line


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((5.1, 6, 7), "The fastest algorithm is ring, at 4.00 ms [3.00 … 5.00]."),
        (
            (5, 6, 7),
            "No clear difference between ring and zigzag: 4.00 ms [3.00 … 5.00] and "
            "6.00 ms [5.00 … 7.00] (the intervals overlap).",
        ),
    ],
)
def test_whole_sequences_are_compared_with_one_rank_and_with_each_other(say, second, said):
    found = [
        exact("peak_memory", 8.0, scope="dense forward"),
        exact("peak_memory", 2.0, scope="ring forward"),
        timed("dense forward", 14, 15, 17),
        timed("zigzag forward", *second),
        timed("ring forward", 3, 4, 5),
    ]
    case = {"seq_len": 2048, "dtype": "float32", "world_size": 4, "batch_size": 3}
    case |= {"prefill_algorithms": ["ring", "zigzag"]}
    (line,) = say("distributed", [(case, found)])
    assert line == (
        "float32: Prefill of 2,048 tokens (forward) is faster on 4 ranks than on one: "
        f"the speed-up is 3.75× [2.80 … 5.67], 94% [70% … 142%] of perfect scaling. {said}"
    )


def test_at_most_five_findings_speak_of_the_longest_sequences(say):
    algorithms = {"fused": ((8, 9, 9.5), 2, COMPUTING)}
    cases = [
        decode_case(algorithms, alone=(26, 27, 30), seq_len=n, dtype=dtype)
        for dtype in ("float32", "bfloat16", "float16")
        for n in (64, 4096)
    ]
    scaling, more, limit = say("distributed", cases)
    assert scaling.startswith("bfloat16: Decoding over 4,096 keys is faster on 4 ranks")
    assert more.startswith("float16: Decoding over 4,096 keys is faster on 4 ranks")
    assert limit.startswith("bfloat16: Decoding is compute-bound at 4,096 keys on 4 ranks")


def test_a_bar_per_part_of_tree_attention_and_one_for_the_wait(measured):
    """The calls of two ranks, of which the second is slower."""
    names = ["comp_shard_kv", "comp_local_attention", "comm_max_lse", "comp_num_den"]
    names += ["comm_sum_den", "comm_sum_num", "comp_final_output", "wait"]
    ranks = [[{name: scale * (at + 1.0) for at, name in enumerate(names)}] * 6 for scale in (1, 2)]
    shape, _ = decode_case({"three_allreduce": ((8, 9, 9.5), 3, COMPUTING)}, world=2)
    answers = [{"parts": {"three_allreduce": runs}, "errors": {}} for runs in ranks]
    found = [*Launch(answers).algorithm("three_allreduce", None)]
    rows = measured("distributed", [(shape, found)])
    spec = CHARTS["decode_shares"](rows).to_dict()
    (drawn,) = (data for data in spec["datasets"].values() if "series" in data[0])
    assert [(bar["series"], bar["part"], bar["x"]) for bar in drawn] == [
        ("shard keys and values", "compute", 2.0),
        ("local attention", "compute", 4.0),
        ("max log-sum-exp", "communication", 6.0),
        ("numerator denominator", "compute", 8.0),
        ("sum denominator", "communication", 10.0),
        ("sum numerator", "communication", 12.0),
        ("final output", "compute", 14.0),
        ("wait", "wait", 16.0),
    ]
