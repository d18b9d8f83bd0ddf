"""Masks, work and communication of attention, as papers define them."""

import pytest

from nanolib.models.attention import work
from nanolib.models.attention.ranks import Sharding, traffic_of
from nanolib.models.attention.reference import dense_work

# Source: Jiang et al. (2023), Mistral 7B: a token attends to the 4,096 tokens up to itself. Beltagy
# et al. (2020), Longformer: half of the window on each side. Raffel et al. (2020), T5: all see a
# prefix. Krell et al. (2021), packing without contamination: a document sees itself. Qiu et al.
# (2020), blockwise attention.
KEPT = [
    ({"pattern": "window", "window": 4096}, 16384, True, 4096 * 16384 - 4096 * 4095 // 2),
    ({"pattern": "window", "window": 257}, 4096, False, 513 * 4096 - 256 * 257),
    ({"pattern": "prefix_lm", "global_tokens": 512}, 2048, True, 2048 * 2049 // 2 + 512 * 511 // 2),
    ({"pattern": "document", "document_lengths": [96, 160]}, 256, True, 48 * 97 + 80 * 161),
    ({"pattern": "block", "window": 128}, 1024, True, 8 * 64 * 129),
]


@pytest.mark.parametrize(("options", "length", "causal", "kept"), KEPT)
def test_a_pattern_keeps_as_many_pairs_as_published(options, length, causal, kept):
    assert work("sparse", length, length, causal=causal, options=options).kept == kept


# Source: Dao (2023), FlashAttention-2, section 4.1: 4 · length² · head_dim · heads, and half of it
# for a causal mask.
@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_the_flops_of_attention_are_those_of_flash_attentions_benchmark(length):
    heads, head_dim, batch = 16, 128, 16384 // length
    published = 4 * length**2 * head_dim * heads * batch
    assert dense_work(length, length, False).flops(batch, heads, head_dim) == published
    causal = dense_work(length, length, True).flops(batch, heads, head_dim)
    assert causal == published // 2 + published // (2 * length)  # the diagonal is kept whole


# Source: Liu et al. (2023), Ring Attention: a rank passes on the keys and values of p − 1 blocks.
# Jacobs et al. (2023), DeepSpeed-Ulysses: q, k, v and the output, each without the own part. Shyam
# et al. (2024), Tree Attention: 2 (p − 1) / p · (b d + 2 b heads) elements, which are sums in
# float32 here.
RANKS, LENGTH, WIDTH = 8, 65536, 16 * 128
SENT = {
    "ring": 2 * 7 * LENGTH // RANKS * WIDTH * 2,
    "ulysses": 4 * LENGTH // RANKS * WIDTH * 2 * 7 // 8,
    "three_allreduce": 2 * 7 * (WIDTH + 2 * 16) * 4 // RANKS,
}


@pytest.mark.parametrize("algorithm", SENT)
def test_a_rank_sends_as_many_bytes_as_published(algorithm):
    shape = {"batch": 1, "heads": 16, "kv_heads": 16, "head_dim": 128, "itemsize": 2}
    traffic = traffic_of(algorithm, Sharding.contiguous(LENGTH, RANKS), **shape)
    assert {*traffic.sent} == {SENT[algorithm]}
