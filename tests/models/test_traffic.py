"""The formulas of what ranks send, against sums by hand; `test_ranks` holds them against what ranks do send."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolib.models.attention.ranks import Sharding, Traffic, traffic_of

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 8, "itemsize": 2}
TWO = Sharding.contiguous(11, 2)


@pytest.mark.parametrize(
    ("algorithm", "batch", "layout", "rounds", "hops", "sent"),
    [
        # on two ranks an all-reduce sends its payload once: of 4 heads the largest score, then
        # the sum of weights and 8 weighted values, in float32: 4·4 + 4·4 + 4·4·8
        ("three_allreduce", 1, TWO, 3, 6, (160, 160)),
        ("fused", 1, TWO, 2, 4, (160, 160)),
        # 4·4·9
        ("gather", 1, TWO, 1, 1, (144, 144)),
        # the two queries of one key head with their sums, 2·(8 + 8 + 1)·4, and outputs, 2·8·4
        ("pass_q", 1, TWO, 2, 2, (200, 200)),
        # ten key heads over three ranks: three, three and four, of which each sends on all but one
        # share: 7, 6 and 7 times 136, and 2·4·64
        ("pass_q", 5, Sharding.contiguous(11, 3), 3, 4, (1464, 1328, 1464)),
        # this rank's own 5 or 6 keys and values, to decode or for a whole sequence: 2·2·8·2 each
        ("ring", 1, TWO, 1, 1, (320, 384)),
        ("zigzag", 1, Sharding.zigzag(12, 3), 2, 2, (512, 512, 512)),
        # half of q, k, v and the outputs, 5·(4 + 2 + 2 + 4)·8·2 / 2
        ("ulysses", 1, Sharding.contiguous(10, 2), 4, 4, (480, 480)),
        # three quarters, and of two key heads each twice: 2·(4 + 4 + 4 + 4)·8·2 · 3 / 4
        ("ulysses", 1, Sharding.contiguous(8, 4), 4, 12, (384, 384, 384, 384)),
        ("ring", 1, Sharding.contiguous(8, 1), 0, 0, (0,)),
    ],
)
def test_each_rank_sends_what_one_counts_by_hand(algorithm, batch, layout, rounds, hops, sent):
    traffic = traffic_of(algorithm, layout, batch=batch, **SHAPE)
    assert traffic == Traffic(rounds, hops, sent)


@given(
    make=st.sampled_from([Sharding.contiguous, Sharding.zigzag]),
    total=st.integers(1, 24),
    world=st.integers(1, 5),
)
def test_parts_make_the_whole_again_and_differ_by_one_position_per_piece_at_most(
    make, total, world
):
    layout, positions = make(total, world), torch.arange(total)
    parts = [layout.take(positions, rank, dim=0) for rank in range(world)]
    assert torch.equal(torch.cat(parts).sort().values, positions)
    assert [len(part) for part in parts] == [layout.length(rank) for rank in range(world)]
    lengths = [stop - start for pieces in layout.pieces for start, stop in pieces]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("world", [1, 4])
def test_under_causality_every_rank_of_a_zigzag_has_as_many_pairs(world):
    layout, pairs = Sharding.zigzag(8 * world, world), torch.arange(1, 8 * world + 1)
    assert len({int(layout.take(pairs, rank, dim=0).sum()) for rank in range(world)}) == 1
