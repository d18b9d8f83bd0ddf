import contextlib
import importlib.machinery
import os
import sys
import threading
import types
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from nanolib.measurement import BadInput, Unsupported
from nanolib.models import attention
from nanolib.models.attention import block_loops, block_sparse, dense, flash_attn, flex
from nanolib.models.attention.block_mask import BlockMask, QueryBlock, plan_of_tiles
from nanolib.models.attention.choice import CHOOSERS, global_tokens
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.reference import causal_mask, masked_attention, relative_error
from nanolib.models.attention.sparse import Options, build_mask, choose_mask, watched_work

TOLERANCE = 1e-5


def _qkv(batch, heads, kv_heads, q_len, kv_len, head_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(h, n):
        return torch.randn(batch, h, n, head_dim, generator=generator, requires_grad=True)

    return draw(heads, q_len), draw(kv_heads, kv_len), draw(kv_heads, kv_len)


def _agrees(out, reference, inputs):
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    ours = torch.autograd.grad(out, inputs, gradient)
    theirs = torch.autograd.grad(reference, inputs, gradient.double())
    # All three gradients as one: where a query sees a single key, those of q and k are zero but for rounding.
    together = [torch.cat([g.double().flatten() for g in gradients]) for gradients in (ours, theirs)]
    return max(relative_error(out.detach(), reference.detach()), relative_error(*together)) < TOLERANCE


ALL_PATTERNS = sorted([*PATTERNS, *CHOOSERS])


def _masked(inputs, causal, options):
    """The mask as one tensor, bool [batch or 1, heads or 1, q_len, kv_len]; and itself."""
    mask = choose_mask(*inputs[:2], causal=causal, options=options)
    dense = torch.stack([mask.elements(head) for head in range(len(mask.plans))])
    return dense.reshape(*((1, 1) if mask.shared else inputs[0].shape[:2]), *dense.shape[1:]), mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 5), (2, 2), (2, 5), (3, 5), (5, 5)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_dense_lets_each_of_a_few_queries_see_the_keys_up_to_its_own(causal, q_len, kv_len, kv_heads):
    inputs = _qkv(3, 4, kv_heads, q_len, kv_len)
    mask = causal_mask(q_len, kv_len) if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    out = attention.attend("dense", *inputs, causal=causal)
    assert _agrees(out, masked_attention(*inputs, mask), inputs)


@pytest.mark.parametrize("pattern", ALL_PATTERNS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (64, 64), (1, 77), (33, 200), (5, 5)])
def test_sparse_equals_dense_with_the_same_mask(pattern, causal, q_len, kv_len):
    options = Options(pattern=pattern, window=37, global_tokens=5, random_tokens=9, block_size=32)
    inputs = _qkv(2, 4, 2, q_len, kv_len)
    mask, _ = _masked(inputs, causal, options)
    out = attention.attend("sparse", *inputs, causal=causal, options=options)
    assert _agrees(out, masked_attention(*inputs, mask), inputs)


@pytest.mark.parametrize("pattern", ["window", "strided", "bigbird", "random", "top_k"])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(150, 150), (1, 77)])
def test_what_runs_on_other_devices_equals_the_reference_too(pattern, per_head, q_len, kv_len):
    options = Options(pattern=pattern, window=37, random_tokens=9, block_size=16, sparsity=0.6, per_head=per_head)
    inputs = _qkv(3, 8, 2, q_len, kv_len)
    dense_mask, mask = _masked(inputs, True, options)
    with torch.no_grad():
        out = block_sparse._forward(*inputs, mask, 0.3)
        assert relative_error(out, masked_attention(*inputs, dense_mask, 0.3)) < TOLERANCE


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_queries_before_the_first_key_are_refused_or_right(pattern):
    options = Options(pattern=pattern, window=20, global_tokens=2, block_size=16)
    inputs = _qkv(1, 2, 2, 90, 40)
    if pattern in ("strided", "random", "bigbird"):
        for kind in ("sparse", "flex"):
            with (
                torch.no_grad(),
                pytest.raises(BadInput, match="q: more queries than keys; for a pattern of tiles give at most as many"),
            ):
                attention.attend(kind, *inputs, causal=False, options={"pattern": pattern, "block_size": 16})
        return
    dense_mask, mask = _masked(inputs, False, options)
    blind = ~dense_mask[0, 0].any(dim=1)
    assert 0 < blind.sum() < 90 or pattern == "local_global"
    with torch.no_grad():
        for out in (
            attention.attend("sparse", *inputs, causal=False, options=options),
            block_sparse._forward(*inputs, mask, 0.25),
        ):
            assert relative_error(out, masked_attention(*inputs, dense_mask)) < TOLERANCE
            assert not out[:, :, blind].any()


@settings(max_examples=int(os.environ.get("NANOLIB_EXAMPLES", "150")), derandomize=True)
@given(
    pattern=st.sampled_from(ALL_PATTERNS),
    causal=st.booleans(),
    kv_len=st.integers(1, 90),
    queries=st.integers(1, 90),
    batch=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3]),
    options=st.fixed_dictionaries(
        {
            "window": st.integers(1, 100),
            "global_tokens": st.integers(0, 40),
            "random_tokens": st.integers(0, 40),
            "block_size": st.integers(1, 50),
            "top_p": st.floats(0.1, 1.0),
            "seed": st.integers(0, 3),
            "per_head": st.booleans(),
        }
    ),
)
def test_sparse_equals_dense_for_any_shape(pattern, causal, kv_len, queries, batch, group, options):
    q_len = min(queries, kv_len)
    parsed = Options(pattern=pattern, **options)
    inputs = _qkv(batch, 2 * group, 2, q_len, kv_len, head_dim=8)
    dense, mask = _masked(inputs, causal, parsed)
    out = attention.attend("sparse", *inputs, causal=causal, options=parsed)
    assert _agrees(out, masked_attention(*inputs, dense), inputs)
    work = mask.work
    assert work.kept == pytest.approx(float(dense.flatten(0, 1).sum(dim=(1, 2)).double().mean()))
    if pattern != "dca":  # whose chosen keys are packed
        tiles = [_tiles(head, parsed.block_size) for head in dense.flatten(0, 1)]
        assert work.kept_tiles == pytest.approx(sum(tiles) / len(tiles))


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize(("pattern", "slack"), [("random", 0.02), ("strided", 0.02), ("block", 0.02), ("top_k", 0.02)])
def test_a_pattern_of_tiles_has_the_sparsity_asked_for(pattern, sparsity, slack):
    options = Options(pattern=pattern, sparsity=sparsity, block_size=16)
    q, k, _ = _qkv(1, 2, 2, 640, 640)
    work = choose_mask(q, k, causal=False, options=options).work
    assert work.sparsity == pytest.approx(sparsity, abs=slack) == work.block_sparsity
    if pattern == "random":
        assert work.kept == 640 * round((1 - sparsity) * 40) * 16


def test_heads_draw_for_themselves_when_asked_to():
    q, k, _ = _qkv(2, 3, 3, 256, 256)
    options = {"pattern": "random", "sparsity": 0.75, "block_size": 16}
    alone = choose_mask(q, k, causal=False, options=Options(**options, per_head=True))
    assert len(alone.plans) == 6 and alone.plans[0] == alone.plans[3] and not alone.shared
    assert not torch.equal(alone.elements(0), alone.elements(1))
    assert torch.equal(alone.elements(), alone.elements(0))
    assert choose_mask(q, k, causal=False, options=Options(**options)).shared


def test_top_k_keeps_the_tiles_that_hold_the_attention():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 1, 64, 16, generator=generator) * 0.01
    k = torch.randn(1, 1, 64, 16, generator=generator) * 0.01
    q[:, :, 48:], k[:, :, 16:32] = 3.0, 3.0  # the last row of tiles looks at the second column
    mask = choose_mask(q, k, causal=True, options=Options(pattern="top_k", sparsity=0.5, block_size=16))
    assert mask.plans[0][3].runs == ((16, 32), (48, 64))


def test_threshold_keeps_more_where_attention_is_spread():
    generator = torch.Generator().manual_seed(2)
    k = torch.randn(1, 1, 256, 16, generator=generator)
    kept = []
    for sharpness in (0.1, 30.0):
        mask = choose_mask(
            sharpness * k, k, causal=False, options=Options(pattern="threshold", top_p=0.9, block_size=16)
        )
        kept.append(mask.work.kept)
    assert kept[0] > 3 * kept[1]


def test_dca_takes_as_many_globals_as_the_scores_stand_out():
    flat, peaks = torch.zeros(100), torch.zeros(100)
    peaks[[3, 50, 97]] = 5.0
    assert global_tokens(peaks, 10).tolist() == [3, 50, 97]
    assert len(global_tokens(peaks, 2)) == 2 and len(global_tokens(flat, 10)) == 1 and len(global_tokens(peaks, 0)) == 0
    q, k, _ = _qkv(1, 2, 2, 100, 100)
    options = Options(pattern="dca", window=4, global_tokens=10, random_tokens=0, block_size=25)
    mask = choose_mask(q, k, causal=True, options=options, scores=peaks[None]).elements(0)
    assert mask[99, [3, 50, 97]].all() and not mask[99, 10] and not mask[2, 3]


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("window", [1], [0]),
        ("global_tokens", [0], [-1]),
        ("random_tokens", [0], [-1]),
        ("sparsity", [0, 0.99, None], [-0.01, 1, 1.5]),
        ("top_p", [1e-9, 1], [0, 1.01]),
        ("block_size", [1], [0]),
        ("seed", [0, 2**31 - 1], [-1, 2**31]),
    ],
)
def test_an_option_has_its_limits(field, inside, outside):
    for value in inside:
        assert getattr(Options(pattern="window", **{field: value}), field) == value
    for value in outside:
        with pytest.raises(BadInput, match=field):
            Options(pattern="window", **{field: value})


def test_what_the_options_are_unless_told():
    """Recorded runs and the texts of notebooks mean these."""
    assert Options().model_dump() == {
        "pattern": "local_global",
        "window": 256,
        "global_tokens": 32,
        "random_tokens": 0,
        "sparsity": None,
        "top_p": 0.9,
        "block_size": 128,
        "seed": 0,
        "per_head": False,
    }


def test_a_bag_of_options_gives_each_kind_its_own_and_refuses_what_is_none_of_them():
    options = attention.shared_options("sparse", {"window": 7, "backend": "math"})
    assert options == Options(window=7) and attention.shared_options("flash_attn", {"window": 7}).model_dump() == {}
    with pytest.raises(BadInput, match=r"attention_options\.windw: no attention kind takes it; dense takes backend"):
        attention.shared_options("dense", {"windw": 7})


@pytest.mark.parametrize("pattern", ALL_PATTERNS)
def test_a_learned_score_is_for_dca_alone(pattern):
    assert attention.chooses_by_score("sparse", {"pattern": pattern}) == (pattern == "dca")
    assert not attention.chooses_by_score("dense", {"pattern": pattern})


@pytest.mark.parametrize("pattern", ["threshold", "dca"])
def test_a_pattern_that_follows_the_input_takes_no_sparsity(pattern):
    with pytest.raises(BadInput, match="keeps what the input asks for"):
        Options(pattern=pattern, sparsity=0.5)


@pytest.mark.slow
def test_flex_equals_the_reference_forward_and_says_that_it_has_no_backward_on_cpu():
    q, k, v = _qkv(1, 2, 2, 256, 256, head_dim=16)
    options = {"pattern": "random", "sparsity": 0.5, "block_size": 128}
    with torch.no_grad():
        out = attention.attend("flex", q, k, v, causal=True, options=options)
    mask, _ = _masked((q, k, v), True, Options(**options))
    assert relative_error(out, masked_attention(q, k, v, mask).detach()) < TOLERANCE
    with pytest.raises(Unsupported, match="no backward pass on CPU; use sparse"):
        attention.attend("flex", q, k, v, causal=True, options=options)


@pytest.mark.parametrize(("batch", "heads", "per_head"), [(1, 3, False), (1, 3, True), (2, 1, True), (2, 3, True)])
def test_flex_is_given_the_same_mask(batch, heads, per_head):
    q, k, _ = _qkv(batch, heads, 1, 64, 96)
    options = Options(pattern="random", sparsity=0.5, block_size=16, per_head=per_head)
    dense_mask, mask = _masked((q, k), True, options)
    found = flex.flex_mask(mask, q)
    kept = torch.stack([found.mask_mod(*at) for at in torch.cartesian_prod(*map(torch.arange, (batch, heads, 64, 96)))])
    assert torch.equal(kept.view(batch, heads, 64, 96), dense_mask.expand(batch, heads, 64, 96))
    assert found.shape == (*dense_mask.shape[:2], 64, 96) and found.BLOCK_SIZE == (16, 16)
    tiles = dense_mask.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).any(dim=-1).any(dim=3)
    assert torch.equal(found.to_dense().bool(), tiles)
    assert flex.work(64, 96, causal=True, options=options) == attention.work(
        "sparse", 64, 96, causal=True, options=options
    )


def test_flex_keeps_the_masks_of_the_last_sixteen(monkeypatch):
    made = []
    monkeypatch.setattr(flex, "_masks", {})
    monkeypatch.setattr(flex, "_made", lambda mask, q: made.append(mask) or len(made))
    masks, q = [object() for _ in range(17)], torch.zeros(1)
    assert [flex.flex_mask(mask, q) for mask in masks[:16]] == list(range(1, 17))
    assert flex.flex_mask(masks[0], q) == 1 and len(made) == 16
    assert flex.flex_mask(masks[16], q) == 17 and flex.flex_mask(masks[1], q) == 2
    assert flex.flex_mask(masks[0], q) == 18  # the oldest made room


def test_flash_attn_says_what_it_lacks(monkeypatch):
    q, k, v = (x.detach() for x in _qkv(1, 1, 1, 8, 8))
    with pytest.raises(
        Unsupported, match="flash_attn is not installed; on a machine with CUDA: pip install flash-attn"
    ):
        attention.attend("flash_attn", q, k, v, causal=True)


@pytest.fixture
def flash_package(monkeypatch):
    """The package as it is found, and nothing in it."""
    package = types.ModuleType("flash_attn")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    flash_attn.kernel.cache_clear()
    yield package
    flash_attn.kernel.cache_clear()


@pytest.mark.parametrize(("module", "returns"), [("flash_attn", "out"), ("flash_attn.cute", "tuple")])
def test_flash_attn_is_called_as_either_version_wants_it(monkeypatch, flash_package, module, returns):
    """The package needs CUDA; what it is handed, and how its answer is read, does not."""

    def function(q, k, v, softmax_scale, causal):
        assert (q.shape, softmax_scale, causal) == ((1, 8, 2, 16), 0.5, True)
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=softmax_scale, enable_gqa=True
        ).transpose(1, 2)
        return out if returns == "out" else (out, None)

    holder = flash_package if module == "flash_attn" else types.ModuleType(module)
    holder.flash_attn_func = function
    monkeypatch.setitem(sys.modules, module, holder)
    assert flash_attn.kernel() is function
    q, k, v = (x.detach() for x in _qkv(1, 2, 1, 8, 8))
    with pytest.raises(Unsupported, match="flash_attn has no cpu kernel"):
        attention.attend("flash_attn", q, k, v, causal=True)
    out = flash_attn.call(q, k, v, causal=True, scale=0.5)
    assert relative_error(out, masked_attention(q, k, v, causal_mask(8, 8), 0.5)) < TOLERANCE


def test_flash_attn_takes_short_types_on_a_gpu(monkeypatch, flash_package):
    with pytest.raises(Unsupported, match="flash_attn is installed and has no flash_attn_func"):
        flash_attn.kernel()
    called = []
    flash_package.flash_attn_func = lambda *x, **rest: called.append(rest) or x[0]
    monkeypatch.setattr(flash_attn, "call", lambda *x, **rest: called.append((x, rest)))
    gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    rest = {"causal": True, "scale": 0.5}
    with pytest.raises(Unsupported, match="computes in float16 and bfloat16, not in float32"):
        flash_attn.attend(gpu, gpu, gpu, options=flash_attn.Options(), **rest)
    for gpu.dtype in (torch.float16, torch.bfloat16):
        flash_attn.attend(gpu, gpu, gpu, options=flash_attn.Options(), **rest)
    assert called == [((gpu, gpu, gpu), rest)] * 2
    with pytest.raises(BadInput, match=r"attention_options\.window: unknown name"):
        flash_attn.Options(window=3)


def _tiles(mask, size):
    return sum(bool(part.any()) for rows in mask.split(size, dim=0) for part in rows.split(size, dim=1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["auto", "math", "flash", "tiles"])
def test_dense_equals_the_reference(causal, backend):
    inputs = _qkv(2, 4, 2, 50, 50)
    mask = causal_mask(50, 50) if causal else torch.ones(50, 50, dtype=torch.bool)
    out = attention.attend("dense", *inputs, causal=causal, options={"backend": backend})
    assert _agrees(out, masked_attention(*inputs, mask), inputs)


def test_a_kernel_that_torch_lacks_is_unsupported_and_any_other_error_stays(monkeypatch):
    q, k, v = _qkv(1, 1, 1, 8, 8)
    said = ["No available kernel. Aborting execution.", "out of memory"]

    def fails(*_):
        raise RuntimeError(said.pop(0))

    monkeypatch.setattr(dense, "_call", fails)
    with pytest.raises(Unsupported, match=r"SDPA backend flash has no kernel for torch.float32, head_dim 16 on cpu"):
        attention.attend("dense", q, k, v, causal=True, options={"backend": "flash"})
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        attention.attend("dense", q, k, v, causal=True, options={"backend": "flash"})


def test_a_query_without_any_key_gives_zero_in_the_reference():
    q, k, v = _qkv(1, 2, 1, 3, 4)
    mask = torch.tensor([[True] * 4, [False] * 4, [False, True, False, False]])
    out = masked_attention(q, k, v, mask)
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert torch.equal(out[:, :, 2], v.double()[:, :, 1].expand(1, 2, -1))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_causality_is_aligned_at_the_end(kind):
    q, k, v = _qkv(1, 2, 2, 7, 20)
    options = {"window": 20, "global_tokens": 0} if kind == "sparse" else {}
    out = attention.attend(kind, q, k, v, causal=True, options=options)
    assert relative_error(out.detach(), masked_attention(q, k, v, causal_mask(7, 20)).detach()) < TOLERANCE


def test_a_dense_backend_without_a_kernel_here_is_unsupported():
    q, k, v = _qkv(1, 1, 1, 8, 8)
    with pytest.raises(Unsupported, match="SDPA backend cudnn has no CPU kernel; use math or flash"):
        attention.attend("dense", q, k, v, causal=True, options={"backend": "cudnn"})


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "reach"), [(100, 7), (64, 64), (50, 200), (1, 1)])
def test_window_density_is_the_closed_form(causal, length, reach):
    work = attention.work("sparse", length, length, causal=causal, options={"pattern": "window", "window": reach})
    assert work.kept == closed_form(length, reach, causal)


def test_sparsity_is_of_the_causal_triangle_when_causal():
    work = attention.work("sparse", 4, 4, causal=True, options={"pattern": "window", "window": 1})
    assert (work.kept, work.total, work.sparsity) == (4, 10, 0.6)
    assert attention.work("dense", 4, 4, causal=True).sparsity == 0


def closed_form(length: int, window: int, causal: bool) -> int:
    """Kept pairs of a square window: w·n − w(w − 1)/2 causal, (2w − 1)·n − w(w − 1) otherwise."""
    w = min(window, length)
    one_side = w * length - w * (w - 1) // 2
    return one_side if causal else 2 * one_side - length


def test_tiles_are_counted_over_the_whole_grid():
    dense = attention.work("dense", 512, 512, causal=True)
    sparse = attention.work("sparse", 512, 512, causal=True, options={"pattern": "window", "window": 1})
    assert (dense.kept_tiles, dense.total_tiles) == (10, 16) and attention.work(
        "flash_attn", 512, 512, causal=True
    ) == dense
    assert attention.work("dense", 300 * 128, 1, causal=False).kept_tiles == 300
    assert attention.work("dense", 128, 512, causal=True).kept_tiles == 4
    assert (sparse.kept_tiles, sparse.total_tiles, sparse.block_sparsity) == (4, 16, 0.75)
    assert dense.kept_tiles / sparse.kept_tiles == 2.5


def test_flops_are_four_per_kept_connection_and_dimension():
    work = attention.work("sparse", 100, 100, causal=False, options={"pattern": "window", "window": 5})
    assert work.flops(batch=2, heads=3, head_dim=16) == 4 * 2 * 3 * work.kept * 16


@pytest.mark.parametrize("sparsity", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("causal", [True, False])
def test_the_window_for_a_sparsity_is_the_largest_that_reaches_it(sparsity, causal):
    got = attention.work("sparse", 300, 300, causal=causal, options={"pattern": "window", "sparsity": sparsity})
    assert got.sparsity >= sparsity
    kept = [closed_form(300, w, causal) for w in range(1, 301)]
    assert got.kept == max(k for k in kept if 1 - k / got.total >= sparsity)


def test_who_watches_is_told_what_each_call_keeps():
    inputs = _qkv(1, 2, 2, 96, 96)
    options = Options(pattern="top_k", sparsity=0.5, block_size=16)
    with watched_work() as found:
        for causal in (True, False):
            attention.attend("sparse", *inputs, causal=causal, options=options)
    attention.attend("sparse", *inputs, causal=True, options=options)
    assert found == [_masked(inputs, causal, options)[1].work for causal in (True, False)]


@pytest.mark.parametrize("pattern", ["window", "top_k"])
def test_a_mask_made_anew_is_the_one_that_was_kept(pattern):
    q, k, _ = _qkv(1, 2, 2, 96, 96)
    options = Options(pattern=pattern, window=20, block_size=16)
    kept, made = (choose(q, k, causal=True, options=options) for choose in (choose_mask, build_mask))
    again = choose_mask(q, k, causal=True, options=options)
    assert made is not kept and (again is kept) == (pattern == "window")
    for head in range(2):
        assert torch.equal(made.elements(head), kept.elements(head))
    known = attention.work("sparse", 96, 96, causal=True, options=options)
    assert known == (kept.work if pattern == "window" else None)


def test_tiles_of_dense_attention_are_for_cpus():
    q = torch.zeros(1, 1, 4, 8, device="meta")
    with pytest.raises(Unsupported, match="backend tiles is a kernel for CPUs; use flash"):
        attention.attend("dense", q, q, q, causal=True, options={"backend": "tiles"})


def test_where_nothing_is_kept_the_output_and_all_gradients_are_zero():
    nothing = BlockMask((tuple(QueryBlock((at, at + 4), (), None, 0, 0) for at in (0, 4)),), 8, 8, False, 4)
    inputs = _qkv(1, 2, 1, 8, 8)
    out = block_sparse.attend(*inputs, nothing, 1.0)
    assert not out.any() and not any(x.any() for x in torch.autograd.grad(out.sum(), inputs))


def test_where_no_window_reaches_the_sparsity_it_is_one():
    seen = attention.work("sparse", 4, 4, causal=True, options={"pattern": "window", "sparsity": 0.99, "block_size": 2})
    assert seen.kept == closed_form(4, 1, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "dens"}, "attention_type: 'dens' is no attention kind"),
        ({"options": {"backend": "fast"}}, "attention_options.backend: 'fast' will not do"),
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
        (1, 128, 2048, torch.float32, 1),  # large enough for oneDNN, as the next
        (8, 128, 256, torch.float32, 1),
        (64, 32, 64, torch.float32, 64),  # 85 would fit
        (64, 64, 256, torch.float32, 12),  # 12 · 64 · 320 scores, of 2^18
        (64, 64, 512, torch.float64, 7),
        (4, 256, 2048, torch.float64, 1),  # twice as many scores
    ],
)
def test_as_many_heads_go_at_once_as_keep_their_scores_near_the_core(heads, block, window_, dtype, together):
    q, k, _ = (x.detach().to(dtype) for x in _qkv(1, heads, heads, 2048, 2048, head_dim=4))
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
    inputs = _qkv(2, 5, 5, 96, 96, head_dim=8)
    options = {"pattern": pattern, "window": 32, "block_size": 16}
    out = attention.attend("sparse", *inputs, causal=True, options=options)
    mask, _ = _masked(inputs, True, Options(**options))
    assert _agrees(out, masked_attention(*inputs, mask), inputs)


@pytest.mark.parametrize("pattern", ["random", "window", "top_k"])
@pytest.mark.parametrize("causal", [True, False])
def test_large_blocks_which_onednn_multiplies_equal_dense_too(monkeypatch, pattern, causal):
    multiplied = []
    linear = block_loops.onednn.linear

    def watched(x, weight):
        multiplied.append(x.shape[0])
        return linear(x, weight)

    inputs = _qkv(1, 4, 2, 600, 600)
    options = Options(pattern=pattern, window=300, block_size=128)
    mask, _ = _masked(inputs, causal, options)

    def agrees():
        out = attention.attend("sparse", *inputs, causal=causal, options=options)
        return _agrees(out, masked_attention(*inputs, mask), inputs)

    assert agrees()
    monkeypatch.setattr(block_loops.onednn, "linear", watched)
    monkeypatch.setattr(block_sparse, "_forward", None)  # is for other devices
    monkeypatch.setattr(block_sparse, "_loop", lambda name: getattr(block_loops, name))  # compiled ones call no watcher
    assert agrees()
    assert len(multiplied) >= 5 * 2 * 3  # scores, values and three gradients of the larger blocks, of both key heads


def test_only_large_products_in_float32_on_a_cpu_are_for_onednn():
    many = 2**15
    assert block_loops.is_for_onednn(torch.empty(1), many)
    assert not block_loops.is_for_onednn(torch.empty(1), many - 1)
    assert not block_loops.is_for_onednn(torch.empty(1, dtype=torch.float64), many)
    assert not block_loops.is_for_onednn(torch.empty(1, device="meta"), many)


@pytest.mark.parametrize(
    ("rows", "width", "columns", "goes"),
    [(2, 2**14, 1, True), (2, 1, 2**14, True), (2**14, 1, 1, False), (2, 2**13, 2**13, False)],
)
def test_a_product_goes_to_onednn_by_the_scores_on_either_side_of_it(monkeypatch, rows, width, columns, goes):
    multiplied = []
    monkeypatch.setattr(block_loops.onednn, "linear", lambda x, y: multiplied.append(x.shape) or x @ y.T)
    x, y = torch.ones(1, rows, width), torch.ones(1, columns, width)
    assert torch.equal(block_loops.product(x, y), torch.full((1, rows, columns), float(width)))
    assert multiplied == [x.shape[1:]] * goes


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
