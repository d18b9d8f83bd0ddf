"""A sequence is split over ranks without a gap; `test_ranks` counts what ranks send."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolib.models.attention.ranks import Sharding


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
