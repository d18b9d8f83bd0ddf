"""FLOPs by formula beside torch's own count."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.meters import flops as counting
from nanolib.meters.flops import count_flops, model_flops
from nanolib.models import attention


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_model_flops_agree_with_torchs_count_to_the_digit(mlp, kv_heads):
    config = NanoConfig(
        vocab_size=100, d_model=32, num_layers=2, num_heads=4, num_kv_heads=kv_heads, mlp=mlp
    )
    ids = generate_random_batch(2, 16, 100)
    # torch counts causal attention in full, so the formula is given all pairs
    assert (
        count_flops(lambda: create_model(config)(ids))
        == model_flops(config, 2, 16, lambda q, kv: q * kv)["total"]
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", ["window", "strided", "bigbird"])
def test_sparse_attention_computes_what_its_tiles_say(pattern, causal):
    """It must skip the work it claims to skip."""
    q = torch.randn(1, 1, 320, 16)
    options = {
        "pattern": pattern,
        "window": 96 if pattern == "strided" else 32,
        "global_tokens": 8,
        "random_tokens": 32,
        "block_size": 32,
    }
    counted = count_flops(
        lambda: attention.attend("sparse", q, q, q, causal=causal, options=options)
    )
    work = attention.work("sparse", 320, 320, causal=causal, options=options)
    assert counted == 4 * 16 * work.kept_tiles * 32 * 32
    assert work.kept_tiles < 0.6 * work.total_tiles


def test_flops_after_a_prompt_agree_with_torchs_count():
    config = NanoConfig(vocab_size=100, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2)
    model = create_model(config).eval()
    prompt, more = generate_random_batch(2, 12, 100), generate_random_batch(2, 1, 100, seed=1)
    with torch.no_grad():
        cache = model.new_cache(2, 12, 4)
        model.prefill(prompt, cache)
        counted = count_flops(lambda: model.decode(more[:, 0], cache))
    assert counted == model_flops(config, 2, 1, lambda q, kv: q * kv, position=12)["total"]


def _encoder_layer(x):
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()(x)


_PAIRS, _PROJECTIONS = 4 * 64 * 16, 4 * 2 * 8 * 16 * 16  # of 8 tokens of width 16
_OFFSETS = torch.tensor([2, 4, 4, 8], dtype=torch.int32)  # of four experts the third gets no row


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (
            lambda: F.grouped_mm(torch.ones(8, 16), torch.ones(4, 16, 8), offs=_OFFSETS),
            2 * 8 * 16 * 8,
        ),
        (lambda: F.grouped_mm(torch.ones(4, 8, 16), torch.ones(4, 16, 8)), 4 * 2 * 8 * 16 * 8),
        (lambda: torch.ones(3, 4) @ torch.ones(4), 2 * 3 * 4),
        (lambda: torch.ones(4) @ torch.ones(4), 2 * 4),
        (
            lambda: torch._int_mm(*(torch.ones(32, 32, dtype=torch.int8) for _ in range(2))),
            2 * 32**3,
        ),
        (lambda: _encoder_layer(torch.ones(1, 8, 16)), _PROJECTIONS + _PAIRS + 2 * 2 * 8 * 16 * 32),
        (lambda: nn.LSTM(16, 16)(torch.ones(8, 1, 16)), 2 * 8 * 2 * 16 * 64),
    ],
)
def test_products_that_torchs_counter_leaves_out_are_counted(call, flops):
    with torch.no_grad():
        assert count_flops(call) == flops


def test_the_backward_pass_of_products_that_torchs_counter_leaves_out_is_twice_the_forward():
    x, experts = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16, 8, requires_grad=True)
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    lstm = nn.LSTM(16, 16)
    for forward, flops in (
        (lambda: F.grouped_mm(x, experts, offs=_OFFSETS), 2 * 8 * 16 * 8),
        (lambda: F.scaled_dot_product_attention(q, q, q), 4 * 2 * 64 * 16),
        (lambda: lstm(torch.randn(8, 1, 16, requires_grad=True))[0], 2 * 8 * 2 * 16 * 64),
    ):
        assert count_flops(lambda forward=forward: forward().square().sum().backward()) == 3 * flops


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_kernels_that_compute_scores_anew_take_two_and_a_half_times_as_much_backward(kernel):
    """Heads that share keys count as those that do not."""
    formulas = counting._operations(counting._ADDED)
    forward, backward = (
        formulas[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{end}")]
        for end in ("", "_backward")
    )
    query, shared = (2, 8, 64, 16), (2, 2, 64, 16)
    assert forward(query, shared, shared) == 4 * 2 * 8 * 64 * 64 * 16
    assert backward(query, query, shared, shared) == 2.5 * forward(query, shared, shared)
