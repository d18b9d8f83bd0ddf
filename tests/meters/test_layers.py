import pytest
import torch

from nanolib import NanoConfig, create_model
from nanolib.measurement import BadInput
from nanolib.meters.layers import STATISTICS, LayerProfiler, ProfilingConfig, create_profiler
from nanolib.models.user import build_model
from tests.models.test_user import TINY


@pytest.fixture
def model():
    return create_model(
        NanoConfig(d_model=32, num_layers=4, num_heads=4, vocab_size=300, context_length=64), seed=0
    ).eval()


IDS = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", [ProfilingConfig.minimal(), ProfilingConfig.standard()])
@torch.inference_mode()
def test_the_output_is_the_same_to_the_last_bit(model, config):
    before = model(IDS)
    with create_profiler(model, config) as profiler:
        assert torch.equal(model(IDS), before)
    assert torch.equal(model(IDS), before)
    assert all("forward" not in vars(module) for module in model.modules())
    assert profiler.results()[0].calls_ms  # what was seen stays


def test_gradients_are_the_same_to_the_last_bit(model):
    def gradients():
        model.zero_grad()
        model.loss(IDS).backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    with LayerProfiler(model, ProfilingConfig.standard()):
        within = gradients()
    assert all(torch.equal(a, b) for a, b in zip(before, within, strict=True))


@torch.inference_mode()
def test_minimal_times_the_blocks_and_what_stands_beside_them(model):
    with LayerProfiler(model) as profiler:
        for _ in range(3):
            model(IDS)
    found = {row.name: row for row in profiler.results()}
    assert [name for name, row in found.items() if row.kind == "block"] == [f"blocks.{i}" for i in range(4)]
    assert {"embedding", "norm", "head"} < set(found) and "blocks.0.mlp" not in found
    assert all(len(found[name].calls_ms) == 3 for name in ("", "blocks.0", "head"))
    assert found["rope"].inside == "blocks.0" and found["blocks.0"].inside == "" and found[""].inside is None
    parts = sum(row.total_ms for row in found.values() if row.inside == "")
    assert 0 < parts <= found[""].total_ms  # within the whole, which holds them
    assert not any(len(row.statistics) for row in found.values())


@torch.inference_mode()
def test_standard_times_every_module_and_summarises_now_and_then(model):
    config = ProfilingConfig.custom(every_kth_token=3, every_nth_layer=2, near_zero=0.05)
    outputs = []
    handle = model.blocks[2].mlp.down.register_forward_hook(lambda m, i, out: outputs.append(out))
    with LayerProfiler(model, config) as profiler:
        for _ in range(7):
            model(IDS)
    handle.remove()
    found = {row.name: row for row in profiler.results()}
    assert "blocks.2.mlp.down" in found and "blocks.1.mlp.down" not in found and found["blocks.1"].kind == "block"
    down = found["blocks.2.mlp.down"]
    assert len(down.calls_ms) == 7 and down.statistics.shape == (3, len(STATISTICS))
    x = outputs[0]
    expected = [x.abs().mean(), x.std(), x.abs().max(), (x.abs() < 0.05).float().mean()]
    torch.testing.assert_close(down.statistics[0], torch.stack(expected))
    block = found["blocks.2"].total_ms
    parts = {name for name, row in found.items() if row.inside == "blocks.2"}
    assert parts == {f"blocks.2.{part}" for part in ("attention_norm", "attention", "mlp_norm", "mlp")}
    assert sum(found[name].total_ms for name in parts) <= block


def test_everything_is_put_back_when_the_model_raises(model):
    with pytest.raises(BadInput), LayerProfiler(model, ProfilingConfig.standard()):
        model(torch.zeros(1, 65, dtype=torch.int64))
    assert all("forward" not in vars(module) for module in model.modules())


def test_two_profilers_at_once_are_refused_and_the_first_goes_on(model):
    with LayerProfiler(model) as profiler:
        with pytest.raises(BadInput, match="wrapped already"), LayerProfiler(model):
            pass
        with torch.inference_mode():
            model(IDS)
    assert len(profiler.results()[0].calls_ms) == 1
    profiler.reset()
    assert not profiler.results()[0].calls_ms


@torch.inference_mode()
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_models_of_transformers_are_looked_into_too(name):
    pytest.importorskip("transformers")
    model = build_model(f"hf:{name}", TINY, "cpu", "float32", seed=0).eval()
    before = model(IDS).logits
    with LayerProfiler(model, ProfilingConfig.standard()) as profiler:
        assert torch.equal(model(IDS).logits, before)
    found = {row.name: row for row in profiler.results()}
    assert [n for n, row in found.items() if row.kind == "block"] == ["model.layers.0", "model.layers.1"]
    assert {"model.embed_tokens", "model.norm", "lm_head", "model.layers.1.mlp.down_proj"} < set(found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"every_kth_token": 0}, "every_kth_token: 0"),
        ({"every_nth_layer": True}, "every_nth_layer: True"),
        ({"power_sample_interval_ms": -1}, "power_sample_interval_ms: -1"),
        ({"depth": 3}, "depth: there is no such field"),
    ],
)
def test_bad_settings_are_one_line(fields, words):
    with pytest.raises(BadInput, match=words):
        ProfilingConfig.custom(**fields)
