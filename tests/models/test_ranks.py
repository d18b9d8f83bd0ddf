"""Attention across ranks at several world sizes: one launch each, all of whose ranks check everything."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolib.measurement import BadInput
from nanolib.models.attention import ring, ulysses
from nanolib.models.attention.partial import merge, partial_attention, plain
from nanolib.models.attention.ranks import Ranks, Sharding
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.ring import block_gradients, plain_gradients, ring_attention
from nanolib.models.attention.tree import ALGORITHMS, tree_attention_decode
from nanolib.models.attention.ulysses import ulysses_attention
from nanolib.run.ranks import run_ranks
from tests.models import rank_checks
from tests.models.inputs import agrees, qkv

pytestmark = pytest.mark.slow


# Two ranks are each other's next and previous, and four are more than the key heads.
@pytest.fixture(
    scope="module",
    params=[2, 4, *(pytest.param(world, marks=pytest.mark.thorough) for world in (1, 3, 8))],
)
def answers(request):
    """What each rank found, of one launch."""
    return run_ranks(
        rank_checks.check,
        {},
        world_size=request.param,
        device="cpu",
        timeout_s=300,
        private_network=True,
    )


@pytest.mark.parametrize(
    ("overlap", "order"),
    [
        (True, ["send 0", "compute 0", "wait", "send 2", "compute 2", "wait", "compute 1"]),
        (False, ["compute 0", "send 0", "wait", "compute 2", "send 2", "wait", "compute 1"]),
    ],
)
def test_with_overlap_keys_travel_while_their_rank_computes(monkeypatch, overlap, order):
    events = []

    def keys_of(rank):
        return torch.full((1, 1, 4, 1), rank)

    def hop(tensors, length):
        assert length == 4
        owner = int(tensors[0][0, 0, 0, 0])
        events.append(f"send {owner}")
        return lambda: events.append("wait") or [keys_of((owner - 1) % 3)] * 2

    ranks = Ranks()
    monkeypatch.setattr(ranks, "hop", hop)
    monkeypatch.setattr(ranks, "world", 3)
    layout = SimpleNamespace(length=lambda rank: 4)
    for owner, *current in ring.rotate(keys_of(0), keys_of(0), layout, ranks, overlap):
        assert all(torch.equal(found, keys_of(owner)) for found in current)
        events.append(f"compute {owner}")
    assert events == order


def test_every_rank_gets_what_one_process_gets_in_float64(answers):
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        assert len(errors) > 60
        for name, error in errors.items():
            limit = 2e-3 if "bfloat16" in name else 1e-5 if "gradient" in name else 1e-6
            assert error <= limit, (rank, name, error)


def test_ranks_meet_as_often_as_the_formula_says(answers):
    for answer in answers:
        for algorithm, (seen, formula) in answer["rounds"].items():
            assert seen == formula, algorithm


def test_the_interface_counts_the_bytes_of_the_formula(answers):
    if len(answers) == 1 or answers[0]["bytes"]["fused"][0] is None:
        pytest.skip("this system gives ranks no network of their own")
    for algorithm, (counted, formula) in answers[0]["bytes"].items():
        assert formula >= len(answers) * 2**20 / 2, algorithm
        assert 1 <= counted / formula <= 1.05, algorithm


def test_the_components_of_the_profiled_decode_add_up(answers):
    components = [
        "comp_shard_kv",
        "comp_local_attention",
        "comm_max_lse",
        "comp_num_den",
        "comm_sum_den",
        "comm_sum_num",
    ]
    for answer in answers:
        profiled = answer["profiled"]
        assert profiled["error"] <= 1e-6
        waits = ["wait"] if len(answers) > 1 else []
        assert sorted(profiled["names"]) == sorted([*components, "comp_final_output", *waits])
        calls = dict(zip(profiled["names"], profiled["calls"], strict=True))
        assert calls.pop("wait", 9) == 9 and set(calls.values()) == {3}
        assert sum(profiled["shares"].values()) == pytest.approx(profiled["total"], rel=1e-12)


def test_every_rank_refuses_bad_input_before_anything_is_sent(answers):
    starts = ["algorithm: 'trees' is not known", "v: shape", "k, v: torch.bfloat16", "layout:"]
    for answer in answers:
        for message, start in zip(answer["errors of input"], starts, strict=True):
            assert message.startswith(start)


def test_scores_are_multiplied_by_the_factor_given():
    q, k, v = inputs = qkv(2, 4, 2, 10, 10, head_dim=8)
    for attend in (ring_attention, ulysses_attention):
        whole = masked_attention(*inputs, causal_mask(10, 10), 0.9)
        assert agrees(attend(*inputs, scale=0.9), whole, inputs)
    for algorithm in ALGORITHMS:
        last = tree_attention_decode(q[:, :, -1:], k, v, algorithm=algorithm, scale=0.9)
        assert relative_error(last.detach(), whole[:, :, -1:].detach()) < 1e-6


def test_ulysses_attends_in_the_wide_type_on_a_cpu(monkeypatch):
    seen = []
    monkeypatch.setattr(
        ulysses,
        "attend",
        lambda kind, q, k, v, **rest: seen.append((q.dtype, k.dtype, v.dtype)) or q,
    )
    for dtype in (torch.bfloat16, torch.float64):
        q = torch.zeros(1, 2, 3, 8, dtype=dtype)
        assert ulysses_attention(q, q, q).dtype == dtype
    assert seen == [(torch.float32,) * 3, (torch.float64,) * 3]


def test_a_single_rank_refuses_bad_input_too():
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8)
    two_pieces = Sharding(pieces=(((0, 1), (1, 2)),))
    for layout in (Sharding.contiguous(4, 2), Sharding.contiguous(3, 1), two_pieces):
        with pytest.raises(BadInput, match="layout: "):
            tree_attention_decode(q, k, k, layout=layout)
    for layout in (Sharding.contiguous(4, 2), Sharding.contiguous(3, 1)):
        with pytest.raises(
            BadInput,
            match=r"layout: has \d ranks, \d positions here; give 1 ranks, 2 positions",
        ):
            ring_attention(q, k, k, layout=layout)
    with pytest.raises(
        BadInput, match="layout: has several pieces per rank; give one piece per rank"
    ):
        ulysses_attention(q, k, k, layout=Sharding.zigzag(2, 1))


def test_ulysses_refuses_heads_that_do_not_share_out(monkeypatch):
    ranks = SimpleNamespace(world=3)
    monkeypatch.setattr(ulysses, "Ranks", lambda *_: ranks)
    with pytest.raises(BadInput, match=r"4 and 2 heads cannot be shared by 3 ranks"):
        ulysses_attention(torch.randn(1, 4, 2, 8), *torch.randn(2, 1, 2, 2, 8).unbind())


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 2**31))
def test_parts_merge_to_the_whole_whatever_is_empty(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, 4, n, 8, generator=generator) for n in (2, sum(lengths), sum(lengths))
    )
    k, v = k[:, :2], v[:, :2]
    out, lse = partial_attention(q, k[:, :, :0], v[:, :, :0])
    for keys, values in zip(k.split(lengths, dim=2), v.split(lengths, dim=2), strict=True):
        out, lse = merge(out, lse, *partial_attention(q, keys, values))
    expected = masked_attention(q, k, v, torch.ones(2, sum(lengths), dtype=torch.bool))
    assert torch.allclose(out.double(), expected, atol=1e-6)


def test_a_rank_without_keys_has_gradients_of_zero():
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 0, 4)
    lse = torch.full((1, 2, 3), -torch.inf)
    grads = plain_gradients(q, q, torch.zeros_like(q), lse, k, k, False)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, k.shape]
    assert not grads[0].any()


@pytest.mark.parametrize("rows", [5, 12])  # of twelve queries so many at once
@pytest.mark.parametrize("causal", [False, True])
def test_devices_without_the_kernel_compute_the_same(monkeypatch, causal, rows):
    monkeypatch.setattr("nanolib.models.attention.partial._SCORE_BYTES", rows * 2 * 12 * 4)
    q, k, v, grad = torch.randn(4, 1, 2, 12, 8).unbind()
    out, lse = partial_attention(q, k, v, causal=causal)
    other, other_lse = plain(q, k, v, causal, None)
    assert torch.allclose(out, other, atol=1e-6) and torch.allclose(lse, other_lse, atol=1e-6)
    given = grad, q, out, lse, k, v, causal
    for mine, theirs in zip(block_gradients(*given), plain_gradients(*given), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_masked_row_without_keys_is_zero():
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    out, lse = partial_attention(q, k, v, mask=mask)
    assert not out[:, :, 1].any() and lse[:, :, 0].isfinite().all()
    assert (lse[:, :, 1] == -torch.inf).all()
