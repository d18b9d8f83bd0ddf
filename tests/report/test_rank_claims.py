"""No verdict across ranks claims more than its intervals."""

import pytest

from nanolib.experiments.distributed.rank_rows import part_rows
from nanolib.experiments.distributed.view import decode_table
from nanolib.measurement import Measurement, exact
from tests.report.cases import COMPUTING, CORES, decode_case, timed
from tests.report.rows import ended
from tests.shown import CHARTS


@pytest.mark.parametrize(
    ("ring", "gather", "said"),
    [
        ((9.6, 11, 13), (10, 12, 30), "fused is the fastest algorithm."),
        ((9.5, 11, 13), (10, 12, 30), "no clear difference between fused and ring."),
    ],
)
def test_the_fastest_form_across_ranks_overlaps_no_other(say, ring, gather, said):
    forms = {
        "gather": (gather, 1, COMPUTING),
        "ring": (ring, 3, COMPUTING),
        "fused": ((8, 9, 9.5), 2, COMPUTING),
    }
    alone = decode_case({"fused": ((1, 2, 3), 0, COMPUTING)}, world=1)
    fewer = decode_case({"ring": ((1, 2, 3), 2, COMPUTING)}, world=2)
    crowded = decode_case({"ring": ((1, 2, 3), 2, COMPUTING)}, world=8, flags=(CORES,))
    line = say("distributed", [alone, decode_case(forms, alone=(26, 27, 30)), fewer, crowded])[0]
    assert line == (
        "Decoding over 4,096 keys, float32: 4 ranks are 3.00× [2.74 … 3.75] as fast as one rank: fused takes 9.00 ms "
        f"[8.00 … 9.50] per token, 75% [68% … 94%] of perfect scaling; one rank takes 27.0 ms [26.0 … 30.0]; {said}"
    )


@pytest.mark.parametrize(
    ("one", "said"),
    [
        ((9.6, 10, 11), "2 ranks are 1.11× [1.01 … 1.38] as fast as one rank"),
        ((9.4, 10, 11), "no clear difference between 2 ranks and one rank"),
        ((5, 6, 7), "2 ranks are 0.667× [0.526 … 0.875] as fast as one rank"),
    ],
)
def test_whether_ranks_help_is_the_first_thing_said(say, one, said):
    cases = [decode_case({"fused": ((8, 9, 9.5), 2, COMPUTING)}, world=2, alone=one)]
    assert say("distributed", cases)[0].startswith(
        f"Decoding over 4,096 keys, float32: {said}: fused takes 9.00 ms"
    )


def test_scaling_is_against_one_rank_of_the_same_rounds(say, measured):
    crowd = {"gather": ((9.5, 10, 10.5), 1, COMPUTING), "one_message": ((11, 12, 13), 1, COMPUTING)}
    apart = decode_case({"gather": ((1, 2, 3), 0, COMPUTING)}, world=1)  # of another launch
    cases = [apart, decode_case(crowd, world=2, alone=(12.0, 12.6, 13.0))]
    line = say("distributed", cases)[0]
    assert (
        "63% [57% … 68%] of perfect scaling; one rank takes 12.6 ms [12.0 … 13.0]; gather is the fastest"
        in line
    )
    table = decode_table(
        measured("distributed", [(factors, [ended(), *found]) for factors, found in cases])
    )
    two = table[table["world_size"] == 2].set_index("form")
    assert dict(two["efficiency"]) == pytest.approx({"gather": 0.63, "one_message": 0.525})
    assert dict(two["alone"]) == {"gather": 12.6, "one_message": 12.6}
    assert table.loc[table["world_size"] == 1, ["efficiency", "alone"]].isna().all(axis=None)


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
    ("parts", "kind"), [*zip(PARTS, ["compute", "", "wait", "", "communication"], strict=True)]
)
def test_the_table_the_chart_and_the_sentence_name_the_same_bound(say, measured, parts, kind):
    case = decode_case({"fused": ((8, 9, 9.5), 2, parts)})
    rows = measured("distributed", [(case[0], [ended(), *case[1]])])
    (cell,) = decode_table(rows)["bound"]
    spec = CHARTS["decode_scaling"](rows).to_dict()
    drawn = {line["note"] for data in spec["datasets"].values() for line in data if "note" in line}
    sentence = say("distributed", [case])[1]
    told = next(
        (
            one
            for one in ("compute-bound", "bound by waiting", "communication-bound")
            if one in sentence
        ),
        "",
    )
    assert drawn == {f"bound by {cell}"} and cell.startswith(kind or "unclear")
    assert told == {"compute": "compute-bound", "wait": "bound by waiting", "": ""}.get(
        kind, "communication-bound"
    )


def test_without_cores_or_several_ranks_no_form_is_the_fastest(say):
    forms = {"fused": ((8, 9, 9.5), 2, COMPUTING), "ring": ((18, 19, 20), 2, COMPUTING)}
    (line,) = say("distributed", [decode_case(forms, flags=(CORES,))])
    assert "speed is not" in line and "fastest" not in line
    (line,) = say("distributed", [decode_case(forms, world=1)])
    assert "only one rank was measured" in line and "fastest" not in line


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ((5.1, 6, 7), "ring on 4 ranks is the fastest across ranks"),
        ((5, 6, 7), "ring on 4 ranks and zigzag on 4 ranks cannot be told apart"),
    ],
)
def test_a_form_for_whole_sequences_is_told_with_those_that_tie_with_it(say, second, said):
    found = [
        exact("peak_memory", 8.0, scope="dense forward"),
        exact("peak_memory", 2.0, scope="ring forward"),
    ]
    found += [
        timed("dense forward", 14, 15, 17),
        timed("zigzag forward", *second),
        timed("ring forward", 3, 4, 5),
    ]
    case = {
        "seq_len": 2048,
        "dtype": "float32",
        "world_size": 4,
        "prefill_forms": ["ring", "zigzag"],
        "batch_size": 3,
    }
    (line,) = say("distributed", [(case, found)])
    took = "ring on 4 ranks takes 4.00 [3.00 … 5.00] ms, one rank 15.0 [14.0 … 17.0] ms (3.75 [2.80 … 5.67]×, faster)"
    assert line == f"Over 2,048 tokens, forward: {said}: {took}; its peak is 0.25 of one rank's."


@pytest.mark.parametrize(("low", "zero"), [(0.1, ""), (0.0, ", not distinguishable from zero")])
def test_communication_that_is_not_hidden_is_held_against_zero(say, low, zero):
    found = [timed("alone", 7, 8, 9), timed("ddp", 15, 16, 20)]
    found.append(Measurement("exposed_communication", 4.0, low, 6.0, 0.95, 20, scope="ddp"))
    case = {"name": "tiny", "world_size": 4, "strategies": ["ddp"], "batch_size": 3, "seq_len": 64}
    (line,) = say("distributed", [(case, found)])
    assert line.startswith("Training tiny on 4 ranks with ddp: 4.00 [")
    assert f" ms of a step (25%) is communication that computing does not hide{zero}" in line
    assert ("not distinguishable" in line) == bool(zero)
    assert line.endswith(": efficiency 0.500 [0.350 … 0.600].")


@pytest.mark.parametrize(("runs", "confidence"), [(3, 0.75), (6, 0.95)])
def test_a_part_of_few_calls_has_the_confidence_that_its_range_has(runs, confidence):
    calls = [{"compute_a": 1.0 + at, "comm_b": 2.0, "wait_c": 0.5} for at in range(runs)]
    rows = [row for row in part_rows([calls, calls], "ring", (), None) if row.metric == "part_time"]
    assert {row.confidence for row in rows} == {confidence}


def test_the_interval_of_a_time_share_stays_between_nothing_and_all():
    waits = [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 9.0, 0.0]
    runs = [{"comp_local": 9.0, "wait": ms, "comm_sum": 0.0} for ms in waits]
    found = [row for row in part_rows([runs], "fused", (), None) if row.metric == "time_share"]
    assert {row.scope for row in found} == {"fused: compute", "fused: wait", "fused: communication"}
    assert all(0 <= row.low <= row.estimate <= row.high <= 1 for row in found)
    assert any(row.low == 0 < row.estimate for row in found) and any(
        row.high == 1 > row.estimate for row in found
    )


@pytest.mark.parametrize(("exposed", "said"), [(-2.0, "(0%)"), (4.0, "(25%)"), (20.0, "(100%)")])
def test_communication_takes_no_negative_share_of_a_step(say, exposed, said):
    found = [timed("alone", 7, 8, 9), timed("ddp", 15, 16, 20)]
    found.append(Measurement("exposed_communication", exposed, -3.0, 21.0, 0.95, 20, scope="ddp"))
    case = {"name": "tiny", "world_size": 4, "strategies": ["ddp"], "batch_size": 3, "seq_len": 64}
    (line,) = say("distributed", [(case, found)])
    assert f"ms of a step {said} is communication" in line


@pytest.mark.parametrize(
    ("other", "rounds", "said"),
    [
        ((9, 11, 13), 1, "Next: one message meets 1 time(s)."),
        ((9.6, 11, 13), 1, "Next: longer sequences per rank, or fewer ranks."),
        ((9, 11, 13), 2, "Next: longer sequences per rank, or fewer ranks."),
    ],
)
def test_a_form_with_fewer_rounds_is_advised_unless_it_was_slower(say, other, rounds, said):
    sending = PARTS[-1]
    forms = {"one_message": (other, rounds, sending), "fused": ((8, 9, 9.5), 2, sending)}
    assert say("distributed", [decode_case(forms)])[1].endswith(said)
