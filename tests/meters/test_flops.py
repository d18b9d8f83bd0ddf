"""FLOPs: kept pairs, torch's own count, and what has no formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.meters import flops as counting
from nanolib.meters.flops import FlopCount, count_flops, model_flops


@pytest.mark.parametrize(("mlp", "kv_heads"), [("swiglu", 2), ("gelu", 4)])
def test_formulas_agree_with_both_counts_to_the_digit(mlp, kv_heads):
    sizes = {"vocab_size": 100, "d_model": 32, "num_layers": 2, "num_heads": 4, "mlp": mlp}
    config = NanoConfig(**sizes, num_kv_heads=kv_heads)
    model, ids = create_model(config), generate_random_batch(2, 16, 100)
    count = count_flops(lambda: model(ids).sum().backward())
    with FlopCounterMode(display=False) as torchs:
        model(ids).sum().backward()
    # of attention on a CPU torch has no formula
    alone = model_flops(config, 2, 16, 0)["total"]
    assert torchs.get_total_flops() == 3 * alone
    for found, kept in ((count.full, 16 * 16), (count.kept, 16 * 17 // 2)):
        assert found == 3 * model_flops(config, 2, 16, kept)["total"]


_WINDOW = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)  # 21 pairs


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, 64),
        ({"is_causal": True}, 36),
        ({"attn_mask": _WINDOW}, 21),
        ({"attn_mask": torch.zeros(8, 8).masked_fill(~_WINDOW, float("-inf"))}, 21),
        ({"attn_mask": torch.randn(1, 1, 8, 8)}, 64),  # a bias hides nothing
        ({"attn_mask": (torch.arange(8) < 5).expand(1, 1, 8, 8)}, 40),  # padding
    ],
)
def test_attention_counts_the_pairs_that_its_mask_keeps(options, kept):
    q, k = torch.randn(2, 4, 8, 16, requires_grad=True), torch.randn(2, 2, 8, 16)

    def call():
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **options).sum().backward()

    per_pair = 3 * 4 * 2 * 4 * 16
    assert count_flops(call) == FlopCount(per_pair * kept, per_pair * 64)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": _WINDOW, "dropout_p": 0.1}])
def test_a_row_says_that_attention_without_a_kernel_counts_masked_pairs(options):
    # on a CPU no kernel takes two head sizes
    q, v = (torch.randn(2, 4, 8, size, requires_grad=True) for size in (24, 16))
    count = count_flops(lambda: F.scaled_dot_product_attention(q, q, v, **options).sum().backward())
    flops = 3 * 2 * (24 + 16) * 2 * 4 * 64
    assert count == FlopCount(flops, flops, has_split_attention=True)
    assert count.message == "masked pairs count too: attention ran as matrix products"
    # A model may compute the products itself. A softmax over tokens or channels is no attention.
    own = count_flops(lambda: (q @ q.mT).masked_fill(~_WINDOW, -torch.inf).softmax(-1) @ v)
    assert own == FlopCount(flops // 3, flops // 3, has_split_attention=True)
    assert not count_flops(lambda: (q.softmax(1), v[0].softmax(-1))).has_split_attention


@pytest.mark.parametrize("convolution", [nn.Conv1d, nn.ConvTranspose2d])
@pytest.mark.parametrize("learns", [True, False])
def test_the_groups_of_a_convolution_divide_its_backward_pass_too(convolution, learns):
    layer, dimensions = convolution(8, 12, 3, stride=2, groups=4), 1 + (convolution != nn.Conv1d)
    x = torch.randn(5, 8, *[11] * dimensions, requires_grad=learns)
    places = 5 * 5 if dimensions == 1 else 5 * 11 * 11  # outputs, or inputs if it is transposed
    forward = 2 * places * (12 * 8 // 4) * 3**dimensions
    count = count_flops(lambda: layer(x).sum().backward())
    assert count.kept == count.full == forward * (3 if learns else 2)


def test_flex_attention_counts_the_pairs_that_its_block_mask_keeps(monkeypatch):
    monkeypatch.setattr(counting, "_ROWS", 100)
    q, n = torch.randn(2, 3, 290, 16), 290
    window = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 40 + h), 1, 3, n, n, "cpu")
    count = count_flops(lambda: flex_attention(q, q, q, block_mask=window))
    kept = sum(min(i + 1, 40 + head) for head in range(3) for i in range(n))
    assert count == FlopCount(2 * 4 * 16 * kept, 2 * 4 * 16 * 3 * n * n)


_OFFSETS = torch.tensor([2, 4, 4, 8], dtype=torch.int32)  # of four experts the third gets no row


def _experts(x, offsets):
    return F.grouped_mm(x, torch.ones(4, 16, 8), offs=offsets)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda: _experts(torch.ones(8, 16), _OFFSETS), 2 * 8 * 16 * 8),
        (lambda: _experts(torch.ones(4, 8, 16), None), 4 * 2 * 8 * 16 * 8),
        (lambda: torch._int_mm(*torch.ones(2, 32, 32, dtype=torch.int8)), 2 * 32**3),
        (
            lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()(
                torch.ones(1, 8, 16)
            ),
            # four projections, 64 pairs, and two products of the MLP
            4 * 2 * 8 * 16 * 16 + 4 * 64 * 16 + 2 * 2 * 8 * 16 * 32,
        ),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_that_torchs_counter_leaves_out_are_counted(call, flops, mode):
    with mode():
        assert count_flops(call) == FlopCount(flops, flops)
    assert torch.backends.mha.get_fastpath_enabled()


@torch.library.custom_op("nanolib_test::scan", mutates_args=())
def _scan(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@torch.no_grad()
def test_operations_without_a_formula_are_named():
    x = torch.ones(8, 8)

    def call():
        nn.LSTM(8, 8)(x)
        x[0] @ x[0], x @ x[0]
        torch.lgamma(F.layer_norm(_scan(x) @ x, (8,))).softmax(-1)

    count = count_flops(call)
    assert count.kept == 2 * 8**3
    names = "aten::dot, aten::mkldnn_rnn_layer, aten::mv, nanolib_test::scan"
    assert count.message == f"incomplete: there is no formula for {names}"


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_kernels_that_compute_scores_again_do_so_only_in_the_full_count(kernel):
    operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    names = [argument.name for argument in operation._schema.arguments]
    q, k = (torch.empty(2, heads, 64, 16, device="meta") for heads in (8, 2))
    given = dict.fromkeys(names) | {"query": q, "key": k, "value": k, "is_causal": True}
    count = FlopCount()
    counting._Counter(count)._add_sdpa(operation.name(), given)
    forward = 4 * 2 * 8 * 16 * 64
    assert count == FlopCount(2 * forward * 65 // 2, round(2.5 * forward * 64))
