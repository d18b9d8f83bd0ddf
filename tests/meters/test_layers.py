from collections import defaultdict

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nanolib.measurement import BadInput
from nanolib.meters import layers, operations
from nanolib.meters.layers import LayerProfiler
from nanolib.meters.operations import (
    AttentionWatch,
    attention_statistics,
    is_down_projection,
    operation_name,
    sampled_weights,
)
from nanolib.meters.recording import ProfilingConfig
from nanolib.models.training import next_token_loss
from tests.experiments import own

LONG = torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(0))
IDS = LONG[:, :16]
EACH = ProfilingConfig.deep(every_kth_token=1)


@pytest.fixture
def model():
    return own.tiny(d_model=32, num_layers=4).eval()


def values_of(profiler, module):
    """Statistic → its value in each call that looks at the module."""
    found = defaultdict(list)
    for _, name, statistic, value in profiler.trace.rows["statistics"]:
        if name == module:
            found[statistic].append(value)
    return found


@pytest.fixture
def near_zero(monkeypatch):
    """A limit that some values of a small model are below."""
    for module in (layers, operations):
        monkeypatch.setattr(module, "NEAR_ZERO", 0.08)


def _is_as_before(model):
    replaced = {name for module in model.modules() for name in vars(module)}
    replaced &= {"forward", "prefill", "decode"}
    return not replaced and not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("config", [ProfilingConfig.minimal(), ProfilingConfig.standard(), EACH])
def test_outputs_and_gradients_are_the_same_to_the_last_bit(model, config):
    def results():
        model.zero_grad()
        loss = next_token_loss(model, IDS)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    before = results()
    with LayerProfiler(model, config) as profiler:
        # one looks at numbers, torch's profiler records the next, and the third is timed
        within = [results() for _ in range(3)]
    for found in (*within, results()):
        assert all(torch.equal(a, b) for a, b in zip(before, found, strict=True))
    assert _is_as_before(model)
    assert profiler.results()[1].calls_ms  # what was seen stays


@torch.inference_mode()
def test_everything_is_put_back_when_the_model_raises_and_a_later_call_is_seen(model):
    with LayerProfiler(model, EACH) as profiler:
        with pytest.raises(BadInput, match="ids: 65 tokens exceed context_length 64"):
            model(torch.zeros(1, 65, dtype=torch.int64))
        model(IDS)
        model(IDS)
    assert profiler.results()[1].passes == 1
    with pytest.raises(BadInput), LayerProfiler(model, EACH):
        model(torch.zeros(1, 65, dtype=torch.int64))
    assert _is_as_before(model)


@pytest.mark.usefixtures("near_zero")
@torch.inference_mode()
def test_standard_times_every_module_or_summarizes_in_turn_now_and_then(model):
    """A large output by every second element, and the largest of all."""
    config = ProfilingConfig.custom(every_kth_token=2)
    outputs = []
    model.blocks[2].mlp.down.register_forward_hook(lambda m, i, out: outputs.append(out))
    with LayerProfiler(model, config) as profiler:
        for length in (16, 5, 5, 5, 64, 5, 5):
            model(LONG[:, :length])
    found = {row.name: row for row in profiler.results()}
    assert found["rope"].inside == "blocks.0.attention"
    down = found["blocks.2.mlp.down"]
    assert (len(down.calls_ms), len(found["blocks.2"].calls_ms)) == (2, 5)
    seen = values_of(profiler, "blocks.2.mlp.down")
    for at, x in enumerate(outputs[::4]):
        part = x.flatten()[:: 1 if x.numel() <= 2048 else 2]
        near_zero = (part.abs() < 0.08).float().mean()
        expected = {"mean_abs": part.abs().mean(), "sd": part.std(), "max_abs": x.abs().max()}
        told = {name: values[at] for name, values in seen.items()}
        expected = {name: float(x) for name, x in (expected | {"near_zero": near_zero}).items()}
        assert told == pytest.approx(expected)


@pytest.mark.usefixtures("near_zero")
@torch.inference_mode()
def test_deep_statistics_are_those_of_the_models_own_attention(model):
    seen, inputs = [], []
    down = model.blocks[0].mlp.down
    down.register_forward_hook(lambda m, given, out: inputs.append(given[0]))
    config = ProfilingConfig.custom(deep_profiling=True, every_kth_token=1)
    with AttentionWatch(seen.append), LayerProfiler(model, config) as profiler:
        model(IDS)
    found = values_of(profiler, "blocks.0")
    p, kept = sampled_weights(seen[0])
    expected = {
        "attention_entropy": torch.special.entr(p).sum(-1).mean(),
        "attention_max_weight": p.amax(-1).mean(),
        "attention_sparsity": (p[kept] < 0.08).float().mean(),  # the masked half is not in it
        "mlp_kill_ratio": (inputs[0].abs() < 0.08).double().mean(),
    }
    assert 0 < expected["attention_sparsity"] < 1
    for name, value in expected.items():
        values = found[name]
        assert sum(values) / len(values) == pytest.approx(float(value), rel=1e-4), name


_MASK = torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) > 0.3
_MASK[:, 0] = True


@pytest.mark.parametrize(
    ("q_len", "kv_len", "arguments", "sampled"),
    [
        (3, 7, {"attn_mask": _MASK}, 1),
        (3, 7, {"attn_mask": _MASK[:1]}, 1),  # of all queries alike
        (3, 7, {"attn_mask": torch.where(_MASK, 0.0, float("-inf")), "scale": 0.3}, 1),
        (3, 7, {}, 1),
        (200, 200, {"is_causal": True}, 4),
    ],
)
@torch.inference_mode()
def test_weights_looked_at_are_those_of_the_fused_kernel(q_len, kv_len, arguments, sampled):
    g = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, length, 8, generator=g)
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    )
    seen = []
    with AttentionWatch(seen.append):
        out = scaled_dot_product_attention(q, k, v, **arguments, enable_gqa=True)
    weights, kept = sampled_weights(seen[0])
    found = weights @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(found, out[:, :, ::sampled], atol=1e-6, rtol=1e-5)
    if "is_causal" in arguments:
        assert torch.equal(kept[0, 0], torch.ones(q_len, q_len, dtype=torch.bool).tril()[::sampled])


def test_sharp_weights_that_underflow_to_zero_are_near_zero_and_are_not_masked():
    q = 100 * torch.randn(1, 1, 50, 8, generator=torch.Generator().manual_seed(1))
    inputs = {"query": q, "key": q, "is_causal": True}
    weights, kept = sampled_weights(inputs)
    assert (weights[kept] == 0).any() and not weights[~kept].any()
    sparsity = attention_statistics(inputs)["attention_sparsity"]
    assert sparsity == (weights[kept] < 1e-2).double().mean().float()


@torch.inference_mode()
def test_what_is_seen_goes_to_the_trace_as_it_is_made(model):
    fields = {"deep_profiling": True, "every_kth_token": 2, "preallocate_metrics": 1}
    with LayerProfiler(model, **fields) as profiler:
        for _ in range(7):
            model(IDS)
    found = {row.name or "model": row for row in profiler.results()}
    tables = profiler.trace.rows
    ns = {(call, name): ns for call, name, ns in tables["layers"]}
    assert {name for _, name in ns} == set(found)
    plain = [round(1e6 * ms) for ms in found["blocks.1"].calls_ms]
    # 0 and 6 look, and 2 is recorded by torch's profiler
    assert [ns[call, "blocks.1"] for call in (1, 3, 4, 5)] == plain
    assert {call for call, *_ in tables["ops"]} == {2}
    assert {call for call, *_ in tables["statistics"]} == {0, 6}


NAMES = {
    "h.0.attn.c_proj": "attn.c_proj",
    "h.0.mlp.c_proj": "mlp.c_proj",
    "layers.0.mlp.down_proj": "down_proj",
    "layer.0.attention.output.dense": "attention.output.dense",
    "layer.0.output.dense": "output.dense",
    "blocks.0.mlp.down": "down",
    "lm_head": "lm_head",
}


@pytest.mark.parametrize(("path", "name"), NAMES.items())
def test_operations_have_the_names_of_the_modules_of_gpt_2_llama_and_bert(path, name):
    assert operation_name(f"model.{path}", torch.nn.Identity()) == name
    is_down = name in ("mlp.c_proj", "down_proj", "output.dense", "down")
    assert is_down_projection(f"model.{path}") == is_down
