"""Options of the sparse patterns: their limits, what is required, and the masks they describe."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolib.experiments.model.case import ModelCase
from nanolib.measurement import BadInput
from nanolib.models import attention
from nanolib.models.attention.block_mask import static_mask
from nanolib.models.attention.patterns import BY_CORNERS, static_mask_mod
from nanolib.models.attention.sparse import Options
from nanolib.torch_internals import fake_tensors
from tests.models import inputs as mask_mods
from tests.models.inputs import masked_by, qkv


def test_a_bag_of_options_gives_each_kind_its_own():
    assert attention.shared_options("sparse", {"window": 7, "backend": "math"}) == Options(window=7)


def _elements(options, q_len, kv_len, causal):
    mask, _ = masked_by(qkv(1, 2, 2, q_len, kv_len), causal, options)
    return mask[0, 0].tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("documents", "starts"),
    [
        ({"document_lengths": [3, 5]}, [0, 3, 8, 11, 16, 19]),
        ({"document_starts": [20, 5, 99, 4, 5]}, [0, 4, 5, 20]),
    ],
)
def test_a_document_sees_itself(documents, starts, causal):
    number = [sum(start <= i for start in starts) for i in range(21)]
    options = Options(pattern="document", block_size=4, **documents)
    assert _elements(options, 21, 21, causal) == [
        [number[i] == number[j] and (j <= i or not causal) for j in range(21)] for i in range(21)
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_a_prefix_is_seen_whole_and_the_rest_is_causal(causal):
    options = Options(pattern="prefix_lm", global_tokens=6, block_size=4)
    expected = [[j < 6 or j <= i for j in range(17)] for i in range(17)]
    assert _elements(options, 17, 17, causal) == expected
    assert _elements(options, 5, 17, causal) == expected[12:]
    work = attention.work("sparse", 17, 17, causal=causal, options=options)
    dense = 17 * 18 // 2 if causal else 17 * 17  # with the same causality
    assert (work.kept, work.total) == (sum(map(sum, expected)), dense)
    assert work.sparsity == (0 if causal else pytest.approx(1 - work.kept / dense))


FEW = st.integers(0, 40)


@pytest.mark.parametrize("pattern", BY_CORNERS)
@settings(max_examples=20)
@given(
    sizes=st.fixed_dictionaries(
        {
            "window": st.integers(1, 41),
            "global_tokens": FEW,
            "random_tokens": FEW,
            "block_size": st.integers(1, 20),
        }
    ),
    length=st.integers(1, 41),
    q_len=st.integers(1, 90),
    more=st.integers(0, 60),
    causal=st.booleans(),
)
def test_no_kept_pair_is_missed_at_the_corners_of_tiles(
    pattern, sizes, length, q_len, more, causal
):
    lengths = {"document_lengths": [length, 3]} if pattern == "document" else {}
    options = Options(pattern=pattern, **sizes, **lengths)
    kv_len = q_len + more
    found = static_mask(options, q_len, kv_len, causal, 1)
    keeps = static_mask_mod(options, q_len, kv_len, options.hides_future(causal), None)
    kept = keeps(0, 0, np.arange(q_len)[:, None], np.arange(kv_len))
    assert found.work.kept == kept.sum()  # the blocks count the pairs of their own keys


def _own(name, **more):
    return {"pattern": "own", "mask_mod": f"tests.models.inputs:{name}", "block_size": 16, **more}


@pytest.mark.parametrize("kind", ["sparse", "flex"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("document_per_sequence", "uses b, but all sequences share one mask"),
        ("only_the_future", "keeps none of 90 x 90 pairs; return true for the pairs to keep"),
        ("integers", "returned torch.int32; return booleans"),
    ],
)
def test_a_mask_of_ones_own_that_sequences_cannot_share_or_that_is_empty_is_refused(
    kind, name, said
):
    inputs = [x.detach() for x in qkv(2, 4, 2, 90, 90)]
    with pytest.raises(BadInput, match=rf"^attention_options\.mask_mod: tests.*{name} {said}"):
        attention.attend(kind, *inputs, causal=True, options=_own(name))


def test_sequences_share_a_mask_that_draws_its_table():
    q, k, v = (x.detach() for x in qkv(2, 4, 2, 90, 90))
    both = attention.attend("sparse", q, k, v, causal=True, options=_own("drawn"))
    last = attention.attend("sparse", q[1:], k[1:], v[1:], causal=True, options=_own("drawn"))
    assert torch.allclose(both[1:], last, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("even_distance", 4),
        ("even_distance", 1),  # a single head is head 0
        ("document_per_sequence", 4),  # a single sequence is sequence 0
        ("everything", 1),  # a mask may return True instead of a tensor
    ],
)
def test_a_mask_of_ones_own_is_computed_for_each_head(name, heads):
    options = Options(**_own(name))
    b, h, query, key = torch.meshgrid(*map(torch.arange, (1, heads, 70, 90)), indexing="ij")
    mask = getattr(mask_mods, name)(b, h, query + 20, key) & (key <= query + 20)
    found, _ = masked_by(qkv(1, heads, heads, 70, 90), True, options)
    assert torch.equal(found, mask)


def _model(**options):
    sizes = {"d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 64}
    overrides = sizes | {"attention_options": {"block_size": 16} | options}
    case = "cpu", "", "decoder_tiny", overrides, "sparse", 48, 2, "float32", "inference"
    return ModelCase(*case)


def test_the_flops_of_a_model_are_those_of_each_heads_own_mask():
    case = _model(**_own("even_distance"))
    h, query, key = torch.meshgrid(*map(torch.arange, (4, 48, 48)), indexing="ij")
    hidden = int(((key <= query) & ~mask_mods.even_distance(0, h, query, key)).sum())
    dense = replace(case, attention_type="dense").count_work().flops
    assert dense - case.count_work().flops == 2 * 2 * 4 * 16 * hidden  # layers, batch, 4 · head_dim


def test_a_mask_of_ones_own_is_planned_as_the_pattern_that_it_equals(tmp_path, monkeypatch):
    """A plan without data imports and evaluates it first, and leaves it whole for the run."""
    lines = (
        "import torch",
        "REACH = torch.tensor(20)",
        "def near(b, h, i, j):",
        " return i - j < REACH",
    )
    (tmp_path / "mask_to_plan.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    options = {"pattern": "own", "mask_mod": "mask_to_plan:near"}
    with fake_tensors(), torch.device("meta"):
        x = torch.zeros(1, 1, 40, 8, device="cpu")
        attention.attend("sparse", x, x, x, causal=True, options=options)
    own, window = _model(**options), _model(pattern="window", window=20)
    assert own.plan().peaks and own.plan() == window.plan()
    ids = torch.arange(48)[None]
    with torch.no_grad():
        assert torch.equal(own.build(seed=0)(ids), window.build(seed=0)(ids))


def test_a_mask_with_too_many_tiles_is_refused_before_its_tables_are_made():
    with pytest.raises(BadInput, match="block_size: 128 gives 17,179,869,184 tiles at 16,777,216"):
        attention.work("sparse", 2**24, 2**24, causal=True, options={"pattern": "random"})
