import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolib.measurement import BadInput
from nanolib.models.attention.sharding import Sharding

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
    with pytest.raises(BadInput, match="x: 5 positions in dimension 2; this layout has 8"):
        Sharding.contiguous(8, 2).take(torch.zeros(1, 1, 5, 1), 0)
