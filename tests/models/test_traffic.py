"""The formulas of what ranks send, against sums by hand; `test_ranks` holds them against what ranks do send."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolib.measurement import BadInput
from nanolib.models.attention.ranks import Sharding, Traffic, traffic_of

SHAPE = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "itemsize": 2}
TWO = Sharding.contiguous(11, 2)


def test_shares_of_queries_that_differ_pass_by_unevenly():
    """Ten key heads over three ranks: three, three and four, of which each rank sends on all but one share."""
    traffic = traffic_of("pass_q", Sharding.contiguous(11, 3), **SHAPE | {"batch": 5})
    hop, outputs = 2 * (8 + 8 + 1) * 4, 2 * (4 * 2 * 8 * 4)
    assert traffic == Traffic(3, 4, (7 * hop + outputs, 6 * hop + outputs, 7 * hop + outputs))


@pytest.mark.parametrize(
    ("algorithm", "layout", "rounds", "hops", "sent"),
    [
        # on two ranks an all-reduce sends its payload once
        ("three_allreduce", TWO, 3, 6, (4 * 4 + 4 * 4 + 4 * 4 * 8,) * 2),
        ("fused", TWO, 2, 4, (4 * 4 + 4 * 4 * 9,) * 2),
        ("gather", TWO, 1, 1, (4 * 4 * 9,) * 2),
        # one key head's queries with their sums; their outputs
        ("pass_q", TWO, 2, 2, (2 * (8 + 8 + 1) * 4 + 2 * 8 * 4,) * 2),
        # this rank's own keys and values, to decode or for a whole sequence
        ("ring", TWO, 1, 1, (5 * 2 * 2 * 8 * 2, 6 * 2 * 2 * 8 * 2)),
        ("zigzag", Sharding.zigzag(12, 3), 2, 2, (2 * 4 * 2 * 2 * 8 * 2,) * 3),
        # half of q, k, v and the outputs
        ("ulysses", Sharding.contiguous(10, 2), 4, 4, (5 * (4 + 2 + 2 + 4) * 8 * 2 / 2,) * 2),
        (
            "ulysses",
            Sharding.contiguous(8, 4),
            4,
            12,
            (2 * (4 + 4 + 4 + 4) * 8 * 2 * 3 / 4,) * 4,
        ),  # two key heads, each twice
    ],
)
def test_each_rank_sends_what_one_counts_by_hand(algorithm, layout, rounds, hops, sent):
    assert traffic_of(algorithm, layout, **SHAPE) == Traffic(rounds, hops, sent)


def test_one_rank_sends_nothing():
    for algorithm in ("fused", "ring"):
        traffic = traffic_of(algorithm, Sharding.contiguous(8, 1), **SHAPE)
        assert traffic == Traffic(0, 0, (0.0,))


_layouts = st.builds(
    lambda make, total, world: make(total, world),
    st.sampled_from([Sharding.contiguous, Sharding.zigzag]),
    st.integers(1, 24),
    st.integers(1, 5),
)


@given(layout=_layouts)
def test_parts_make_the_whole_again_and_differ_by_one_position_per_piece_at_most(layout):
    positions = torch.arange(layout.total)
    parts = [layout.take(positions, rank, dim=0) for rank in range(len(layout.pieces))]
    assert torch.equal(torch.cat(parts).sort().values, positions)
    assert [len(part) for part in parts] == [layout.length(rank) for rank in range(len(parts))]
    lengths = [stop - start for pieces in layout.pieces for start, stop in pieces]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_under_causality_every_rank_of_a_zigzag_has_as_many_pairs(world):
    layout = Sharding.zigzag(8 * world, world)
    position = torch.arange(layout.total)
    assert len({int((layout.take(position, rank, dim=0) + 1).sum()) for rank in range(world)}) == 1


def test_a_sequence_of_another_length_is_refused():
    with pytest.raises(
        BadInput, match="x: has 5 positions in dimension 2; give 8, as in this layout"
    ):
        Sharding.contiguous(8, 2).take(torch.zeros(1, 1, 5, 1), 0)
