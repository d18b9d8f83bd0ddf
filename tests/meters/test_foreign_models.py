"""Models that others wrote, operation by operation: attention, an MLP in its layers, or a line that says why not."""

import pytest
import torch

from nanolib.meters.layers.operations import FUSED, OperationTimer
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.time.stopwatch import CpuStopwatch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SMALL = {"vocab_size": 64}
MODELS = {
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
        "GPT2LMHeadModel",
    ),
    "llama": (
        "Llama",
        {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "LlamaForCausalLM",
    ),
}
ATTENTION = {"qk", "scale_mask", "softmax", "av"}
MLP = {"gpt2": {"up", "activation", "down"}, "llama": {"gate", "up", "activation", "down"}}
PROJECTIONS = {
    "gpt2": {"qkv_proj", "out_proj"},
    "llama": {"q_proj", "k_proj", "v_proj", "out_proj"},
}


def _model(name, attention):
    kind, fields, model = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        **fields, **SMALL, attn_implementation=attention
    )
    torch.manual_seed(0)
    return getattr(transformers, model)(config).eval()


def _looked_into(model, **given):
    profiler = LayerProfiler(model, deep_profiling=True, every_kth_token=1)
    with torch.no_grad():
        before = model(**given).logits
        with profiler:
            for _ in range(3):
                out = model(**given).logits
    assert torch.equal(before, out)  # to the last bit
    return profiler.deep_results()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_attention_and_mlp_are_named_whatever_computes_them(name, attention):
    layers = _looked_into(_model(name, attention), input_ids=torch.randint(0, 64, (2, 8)))
    steps = ATTENTION if attention == "eager" else {FUSED}
    blocks = [layer for layer in layers if steps & {*layer.operations}]
    assert len(blocks) == 2
    for layer in blocks:
        assert steps | PROJECTIONS[name] | MLP[name] <= {*layer.operations}, layer.operations.keys()
        assert not layer.unseen
        assert {
            "attention_entropy",
            "attention_max_weight",
            "attention_sparsity",
            "mlp_kill_ratio",
        } <= {*layer.statistics}
        for at, whole in enumerate(layer.passes_ms):
            parts = sum(ms[at] for ms in layer.operations.values()) + layer.between_ms[at]
            assert parts == pytest.approx(whole, rel=0.02)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_eager_attention_shows_the_weights_that_the_fused_one_has(name):
    """Two ways to see the same weights, masks included."""
    ids = torch.randint(0, 64, (2, 8))
    ways = []
    for attention in ("eager", "sdpa"):
        layers = _looked_into(_model(name, attention), input_ids=ids)
        blocks = [layer for layer in layers if "attention_entropy" in layer.statistics]
        ways.append(
            [
                [layer.statistics[s][-1] for s in ("attention_entropy", "attention_max_weight")]
                for layer in blocks
            ]
        )
    assert torch.tensor(ways[0]) == pytest.approx(torch.tensor(ways[1]), abs=1e-4)


def _timed(call):
    with OperationTimer(CpuStopwatch(), lambda: (0, "", False), near_zero=1e-2, dead_ns=0) as timer:
        out = call()
    return (
        out,
        [mark.operation for mark in timer.marks],
        {name: float(value) for _, name, value in timer.statistics},
    )


@pytest.mark.parametrize("mask", ["added", "written", "where"])
def test_whatever_hides_a_pair_it_is_not_counted(mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 4) for _ in range(3))
    keep = torch.ones(8, 8, dtype=torch.bool).tril()

    def attend():
        scores = q @ k.mT
        if mask == "added":
            scores = scores + torch.zeros(8, 8).masked_fill(~keep, float("-inf"))
        elif mask == "written":
            scores[..., ~keep] = float("-inf")
        else:
            scores = torch.where(keep, scores, torch.finfo(scores.dtype).min)
        return scores.view(6, 8, 8).softmax(-1).view(2, 3, 8, 8) @ v

    out, operations, seen = _timed(attend)
    assert torch.equal(out, attend())
    assert {"qk", "scale_mask", "softmax", "av"} <= {*operations} and "cache" not in operations
    weights = (q @ k.mT).masked_fill(~keep, float("-inf")).softmax(-1)
    near = ((weights < 1e-2) & keep).sum() / keep.expand_as(weights).sum()
    assert seen["attention_sparsity"] == pytest.approx(float(near), abs=1e-6)
    assert seen["attention_entropy"] == pytest.approx(
        float(torch.special.entr(weights).sum(-1).mean()), abs=1e-5
    )
