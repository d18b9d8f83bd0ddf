"""Attention across ranks at several world sizes: one launch each, whose ranks check everything."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanolib.measurement import BadInput
from nanolib.models.attention import attend, partial, sequence
from nanolib.models.attention.partial import block_gradients, partial_attention, plain
from nanolib.models.attention.ranks import Sharding
from nanolib.models.attention.sequence import ring_attention, ulysses_attention
from nanolib.models.attention.tree import tree_attention_decode
from nanolib.run.ranks import run_ranks
from tests.models import rank_checks
from tests.models.inputs import qkv


# Two ranks are each other's next and previous, and four are more than the key heads.
@pytest.fixture(
    scope="module",
    params=[2, 4, *(pytest.param(world, marks=pytest.mark.thorough) for world in (1, 3, 8))],
)
def answers(request):
    """What each rank found, of one launch."""
    limits = {"device": "cpu", "timeout_s": 300, "private_network": True}
    return run_ranks(rank_checks.check, {}, world_size=request.param, **limits)


@pytest.mark.slow
def test_every_rank_gets_what_one_process_gets_in_float64(answers):
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        assert len(errors) > 50
        for name, error in errors.items():
            limit = 2e-3 if "bfloat16" in name else 1e-5 if "gradient" in name else 1e-6
            assert error <= limit, (rank, name, error)


@pytest.mark.slow
def test_ranks_meet_and_send_as_the_formula_says(answers):
    for answer in answers:
        for algorithm, (rounds, counted, formula, sent) in answer["traffic"].items():
            assert rounds == formula, algorithm
            # some systems give ranks no network of their own
            if len(answers) > 1 and counted is not None:
                assert 1 <= counted / sent <= 1.05, algorithm


X, FITS = torch.zeros(1, 24, 6, 8), {"layout": Sharding.contiguous(6, 1)}


@pytest.mark.parametrize(
    ("attend", "q", "given", "message"),
    [
        (tree_attention_decode, X, FITS | {"algorithm": "trees"}, "algorithm: 'trees' is not"),
        (tree_attention_decode, X, FITS, "q: 6 tokens per sequence; decoding takes one"),
        (tree_attention_decode, X[:, :, :1], {"layout": Sharding.contiguous(3, 1)}, "layout: has"),
        (ring_attention, X[..., :4], FITS, "q, k, v: "),
        (ring_attention, X, {"layout": Sharding.contiguous(6, 2)}, "layout: has 2 ranks, 3 pos"),
        (ulysses_attention, X, {"layout": Sharding.zigzag(6, 1)}, "layout: has several pieces"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(attend, q, given, message):
    with pytest.raises(BadInput, match=f"^{message}"):
        attend(q, X, X, **given)


@pytest.mark.parametrize(
    ("overlap", "order"),
    [
        (True, ["send 0", "compute 0", "wait", "send 2", "compute 2", "wait", "compute 1"]),
        (False, ["compute 0", "send 0", "wait", "compute 2", "send 2", "wait", "compute 1"]),
    ],
)
def test_with_overlap_keys_travel_while_their_rank_computes(overlap, order):
    events = []

    def hop(tensors, length):
        owner, _ = tensors
        events.append(f"send {owner}")
        return lambda: events.append("wait") or [(owner - 1) % 3] * 2

    ranks = SimpleNamespace(rank=0, world=3, hop=hop, time=lambda name: nullcontext())
    layout = SimpleNamespace(lengths=[4] * 3)
    for owner, *current in sequence.rotate([0, 0], layout, ranks, overlap):
        assert current == [owner, owner]
        events.append(f"compute {owner}")
    assert events == order


def test_ulysses_attends_in_the_wide_type_on_a_cpu():
    q, k, v = (x.detach() for x in qkv(1, 2, 2, 30, 30))
    given = [x.bfloat16() for x in (q, k, v)]
    out = ulysses_attention(*given, layout=Sharding.contiguous(30, 1))
    wide = attend("dense", *(x.float() for x in given), causal=True)
    assert torch.equal(out, wide.bfloat16())


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 2)])
def test_ulysses_refuses_heads_that_do_not_share_out(monkeypatch, heads, kv_heads):
    monkeypatch.setattr(sequence, "Ranks", lambda *_: SimpleNamespace(world=3))
    words = f"{heads} and {kv_heads} heads cannot be shared by 3 ranks"
    with pytest.raises(BadInput, match=words):
        ulysses_attention(*qkv(1, heads, kv_heads, 2, 2), layout=None)


@pytest.mark.parametrize("rows", [5, 12])  # of twelve queries so many at once
@pytest.mark.parametrize("causal", [False, True])
def test_devices_without_the_kernel_compute_the_same(monkeypatch, causal, rows):
    monkeypatch.setattr(partial, "_SCORES", rows * 2 * 12)
    q, k, v, grad = torch.randn(4, 1, 2, 12, 8).unbind()
    out, lse = partial_attention(q, k, v, causal=causal)
    other, other_lse = plain(q, k, v, causal)
    assert torch.allclose(out, other, atol=1e-6) and torch.allclose(lse, other_lse, atol=1e-6)
    mine = block_gradients(grad, q, out, lse, k, v, causal)
    theirs = partial.plain_gradients(grad, q, k, v, out, lse, causal)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


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
    assert [len(part) for part in parts] == layout.lengths
    lengths = [stop - start for pieces in layout.pieces for start, stop in pieces]
    assert max(lengths) - min(lengths) <= 1


def test_under_causality_every_rank_of_a_zigzag_has_as_many_pairs():
    layout, pairs = Sharding.zigzag(32, 4), torch.arange(1, 33)
    assert len({int(layout.take(pairs, rank, dim=0).sum()) for rank in range(4)}) == 1
