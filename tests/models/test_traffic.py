"""The formulas of what ranks send, against sums by hand; `test_ranks` holds them against what ranks do send."""

import pytest

from nanolib.models.attention.sharding import Sharding
from nanolib.models.attention.traffic import Traffic, decode_traffic, prefill_traffic

SHAPE = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 8, "itemsize": 2}


@pytest.mark.parametrize(
    ("algorithm", "rounds", "hops", "sent"),
    [
        # on two ranks an all-reduce sends its payload once
        ("three_allreduce", 3, 6, (4 * 4 + 4 * 4 + 4 * 4 * 8,) * 2),
        ("fused", 2, 4, (4 * 4 + 4 * 4 * 9,) * 2),
        ("gather", 1, 1, (4 * 4 * 9,) * 2),
        # this rank's own keys and values
        ("ring", 1, 1, (5 * 2 * 2 * 8 * 2, 6 * 2 * 2 * 8 * 2)),
        # one key head's queries with their sums; their outputs
        ("pass_q", 2, 2, (2 * (8 + 8 + 1) * 4 + 2 * 8 * 4,) * 2),
    ],
)
def test_decode_sends_what_one_counts_by_hand(algorithm, rounds, hops, sent):
    assert decode_traffic(algorithm, Sharding.contiguous(11, 2), **SHAPE) == Traffic(
        rounds, hops, sent
    )


def test_shares_of_queries_that_differ_pass_by_unevenly():
    """Ten key heads over three ranks: three, three and four, of which each rank sends on all but one share."""
    traffic = decode_traffic("pass_q", Sharding.contiguous(11, 3), **SHAPE | {"batch": 5})
    hop, outputs = 2 * (8 + 8 + 1) * 4, 2 * (4 * 2 * 8 * 4)
    assert traffic == Traffic(3, 4, (7 * hop + outputs, 6 * hop + outputs, 7 * hop + outputs))


@pytest.mark.parametrize(
    ("algorithm", "layout", "rounds", "hops", "sent"),
    [
        ("ring", Sharding.contiguous(11, 2), 1, 1, (5 * 2 * 2 * 8 * 2, 6 * 2 * 2 * 8 * 2)),
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
def test_prefill_sends_what_one_counts_by_hand(algorithm, layout, rounds, hops, sent):
    assert prefill_traffic(algorithm, layout, **SHAPE) == Traffic(rounds, hops, sent)


def test_one_rank_sends_nothing():
    assert decode_traffic("fused", Sharding.contiguous(8, 1), **SHAPE) == Traffic(0, 0, (0.0,))
    assert prefill_traffic("ring", Sharding.contiguous(8, 1), **SHAPE) == Traffic(0, 0, (0.0,))
