"""Models that others wrote, operation by operation: their modules have the roles of our own."""

import pytest
import torch

from nanolib.meters.layers.operations import FUSED
from nanolib.meters.layers.profiler import LayerProfiler

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

ROLES = {
    "gpt2": {"qkv_proj", "out_proj", "up", "activation", "down"},
    "llama": {"q_proj", "k_proj", "v_proj", "out_proj", "gate", "up", "activation", "down"},
}


@pytest.mark.parametrize("name", ROLES)
def test_attention_and_mlp_are_named_whoever_wrote_the_model(name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(name, **sizes, vocab_size=64)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.eval()
    with torch.no_grad(), LayerProfiler(model, deep_profiling=True, every_kth_token=1) as profiler:
        for _ in range(2):
            model(input_ids=torch.randint(0, 64, (2, 8)))
    blocks = [layer for layer in profiler.results() if layer.kind == "block"]
    assert len(blocks) == 2
    for layer in blocks:
        (one,) = layer.passes
        assert ROLES[name] | {FUSED} <= {*one.operations}, one.operations
        assert {"attention_entropy", "mlp_kill_ratio"} <= {*layer.values}
        assert 0 < sum(one.operations.values()) <= one.ms
