"""The loops over tiles: what fits, and who shares the cores."""

import contextlib
import subprocess
import sys
import threading

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanolib.measurement import BadInput
from nanolib.models import attention
from nanolib.models.attention import block_loops, block_sparse
from nanolib.models.attention.block_mask import plan_of_tiles
from nanolib.models.attention.reference import masked_attention
from nanolib.models.attention.sparse import Options, choose_mask
from tests.models.inputs import agrees, closed_form, masked_by, qkv


def test_where_no_window_reaches_the_sparsity_it_is_one():
    seen = attention.work("sparse", 4, 4, causal=True, options={"pattern": "window", "sparsity": 0.99, "block_size": 2})
    assert seen.kept == closed_form(4, 1, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "dens"}, "attention_type: 'dens' is no attention kind"),
        ({"options": {"backend": "fast"}}, "attention_options.backend: Input should be "),
        ({"options": {"window": 3}}, "attention_options.window: unknown name"),
        (
            {"kind": "sparse", "options": {"pattern": "windo"}},
            "attention_options.pattern: 'windo' is no pattern; use one",
        ),
        ({"q": torch.zeros(1, 2, 3)}, "q, k: 3 and 4 dimensions"),
        ({"q": torch.zeros(1, 3, 4, 8)}, "k: 2 heads do not divide q's 3"),
        ({"v": torch.zeros(1, 2, 5, 8)}, "v: shape"),
        ({"q": torch.zeros(2, 2, 4, 8)}, "k: shape"),
        ({"q": torch.zeros(1, 2, 9, 8)}, "q: 9 causal queries over 4 keys"),
    ],
)
def test_what_does_not_fit_is_told(change, said):
    x = torch.zeros(1, 2, 4, 8)
    call = {"kind": "dense", "q": x, "k": x, "v": x, "options": None} | change
    with pytest.raises(BadInput) as caught:
        attention.attend(call["kind"], call["q"], call["k"], call["v"], causal=True, options=call["options"])
    assert caught.value.lines[0].startswith(said)


@pytest.mark.parametrize(
    ("heads", "block", "window_", "dtype", "together"),
    [
        (1, 128, 2048, torch.float32, 1),
        (8, 128, 256, torch.float32, 5),  # 5 · 128 · 384 scores, of 2^18
        (64, 32, 64, torch.float32, 64),  # 85 would fit
        (64, 64, 256, torch.float32, 12),  # 12 · 64 · 320 scores, of 2^18
        (64, 64, 512, torch.float64, 7),
        (4, 256, 2048, torch.float64, 1),  # twice as many scores
    ],
)
def test_as_many_heads_go_at_once_as_keep_their_scores_near_the_core(heads, block, window_, dtype, together):
    q, k, _ = (x.detach().to(dtype) for x in qkv(1, heads, heads, 2048, 2048, head_dim=4))
    mask = choose_mask(q, k, causal=True, options=Options(pattern="window", window=window_, block_size=block))
    lists = block_sparse._Lists.of(mask.plans[0], q[0], k[0])
    largest = max((stop - start) * keys for (start, stop), keys in zip(lists.rows, lists.keys, strict=True))
    assert lists.together == together
    assert lists.scores_buffer.numel() == together * largest
    assert lists.taken_buffer.numel() == together * max(lists.keys) * 4


def test_a_block_whose_queries_see_all_its_keys_needs_no_mask():
    """The queries are the last four of sixteen positions: three tiles lie before all of them, the fourth is their own."""
    before, own = (
        plan_of_tiles(torch.tensor([[True, True, True, last]]), 4, 16, causal=True, size=4)[0] for last in (False, True)
    )
    assert before.mask is None and (before.kept, before.runs) == (48, ((0, 12),)) and before.hidden == (0, None)
    assert own.mask.tolist() == (torch.arange(16) <= torch.arange(12, 16)[:, None]).tolist() and own.kept == 58
    assert own.hidden[0] == 13 and torch.equal(own.hidden[1], ~own.mask[:, 13:])


@pytest.mark.parametrize("pattern", ["window", "random"])
@pytest.mark.parametrize("scores", [1, 2 * 16 * 48, 10**9])
def test_it_does_not_matter_how_many_heads_go_at_once(monkeypatch, scores, pattern):
    """One, two, or all five of them: the last group is then a smaller one."""
    monkeypatch.setattr(block_sparse, "_SCORES", scores)
    inputs = qkv(2, 5, 5, 96, 96, head_dim=8)
    options = {"pattern": pattern, "window": 32, "block_size": 16}
    out = attention.attend("sparse", *inputs, causal=True, options=options)
    mask, _ = masked_by(inputs, True, Options(**options))
    assert agrees(out, masked_attention(*inputs, mask), inputs)


@pytest.mark.parametrize("pattern", ["random", "window", "top_k"])
@pytest.mark.parametrize("causal", [True, False])
def test_large_blocks_equal_dense_too(pattern, causal):
    inputs = qkv(1, 4, 2, 600, 600)
    options = Options(pattern=pattern, window=300, block_size=128)
    mask, _ = masked_by(inputs, causal, options)
    out = attention.attend("sparse", *inputs, causal=causal, options=options)
    assert agrees(out, masked_attention(*inputs, mask), inputs)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_loops_are_in_what_torchscript_compiles(name):
    """If it could not, the plain ones would run in their place, and threads would wait for each other."""
    assert isinstance(block_sparse._compiled_loop(name), torch.jit.ScriptFunction)
    assert block_sparse._compiled_loop(name) is block_sparse._compiled_loop(name)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError])
def test_where_torch_compiles_no_loops_the_plain_ones_do(monkeypatch, error):
    def script(loop):
        raise error

    monkeypatch.setattr(torch.jit, "script", script)
    assert block_sparse._compiled_loop.__wrapped__("forward") is block_loops.forward


def test_a_counter_sees_the_plain_loops():
    assert isinstance(block_sparse._loop("forward"), torch.jit.ScriptFunction)
    with FlopCounterMode(display=False):
        assert block_sparse._loop("forward") is block_loops.forward


def test_threads_that_share_heads_share_the_cores_too():
    before = torch.get_num_threads()
    seen = []
    try:
        torch.set_num_threads(4)
        block_sparse._over_heads(lambda part: seen.append((torch.get_num_threads(), part)), torch.zeros(1, 2, 1, 1))
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert sorted(seen) == [(2, [(0, 0)]), (2, [(0, 1)])]
    assert block_sparse._pool(2) is block_sparse._pool(2)


@pytest.mark.parametrize(
    ("device", "threads", "heads", "shared"),
    [("cpu", 4, 3, True), ("cpu", 1, 3, False), ("cpu", 4, 1, False), ("meta", 4, 3, False)],
)
def test_heads_are_shared_among_threads_on_a_cpu_that_has_some(monkeypatch, device, threads, heads, shared):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: contextlib.nullcontext())  # meta has none
    parts = []
    k = torch.zeros(1, heads, 1, 1, device=device)
    block_sparse._over_heads(lambda part: parts.append((threading.get_ident(), part)), k)
    assert sorted(head for _, part in parts for head in part) == [(0, head) for head in range(heads)]
    assert (threading.get_ident() not in dict(parts)) == shared and len(parts) == (heads if shared else 1)


@pytest.mark.parametrize("threads", [1, 2])
def test_autocast_changes_no_product_of_the_tiles(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(5)).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        out = attention.attend(
            "sparse", q, k, v, causal=True, options={"pattern": "window", "window": 16, "block_size": 16}
        )
    expected = attention.attend(
        "sparse", q, k, v, causal=True, options={"pattern": "window", "window": 16, "block_size": 16}
    )
    assert torch.equal(out, expected)


def test_it_can_first_be_imported_by_whoever_plans():
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(), torch.device("meta"):
    from nanolib.models.attention import sparse
    sparse.work(40, 40, causal=True, options=sparse.Options(block_size=16))
from nanolib.models import attention
x = torch.ones(1, 1, 40, 8)
assert torch.allclose(attention.attend("sparse", x, x, x, causal=True, options={"block_size": 16}), x)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
