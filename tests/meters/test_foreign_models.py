"""Models that others wrote, operation by operation: their modules have the roles of our own."""

import pytest
import torch

from nanolib.meters.layers.operations import FUSED
from nanolib.meters.layers.profiler import LayerProfiler

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
ROLES = {
    "gpt2": {FUSED, "qkv_proj", "out_proj", "up", "activation", "down"},
    "llama": {
        *(FUSED, "q_proj", "k_proj", "v_proj", "out_proj"),
        *("gate", "up", "activation", "down"),
    },
}


def _model(name):
    config = transformers.AutoConfig.for_model(name, **SIZES[name], vocab_size=64)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.eval()


@pytest.mark.parametrize("name", list(SIZES))
def test_attention_and_mlp_are_named_whoever_wrote_the_model(name):
    model, ids = _model(name), torch.randint(0, 64, (2, 8))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with LayerProfiler(model, deep_profiling=True, every_kth_token=1) as profiler:
            outs = [model(input_ids=ids).logits for _ in range(2)]
    assert all(torch.equal(before, out) for out in outs)  # to the last bit
    blocks = [layer for layer in profiler.results() if layer.kind == "block"]
    assert len(blocks) == 2
    for layer in blocks:
        (one,) = layer.passes
        assert ROLES[name] <= {*one.operations}, one.operations
        assert {"attention_entropy", "mlp_kill_ratio"} <= {*layer.values}
        assert 0 < sum(one.operations.values()) <= one.ms
