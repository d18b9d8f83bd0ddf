import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from nanolib import NanoConfig, create_model
from nanolib.measurement import BadInput
from nanolib.meters.layers.operations import FUSED, AttentionWatch, sampled_weights
from nanolib.meters.layers.profiler import LayerProfiler, create_profiler
from nanolib.meters.layers.recording import STATISTICS, ProfilingConfig, sample_of, summarize
from nanolib.store import Run, Store


@pytest.fixture
def model():
    return create_model(
        NanoConfig(d_model=32, num_layers=4, num_heads=4, vocab_size=300, context_length=64), seed=0
    ).eval()


IDS = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))


EACH = ProfilingConfig.deep(every_kth_token=1)


@pytest.mark.parametrize("config", [ProfilingConfig.minimal(), ProfilingConfig.standard(), EACH])
@torch.inference_mode()
def test_the_output_is_the_same_to_the_last_bit(model, config):
    before = model(IDS)
    with create_profiler(model, config) as profiler:
        assert torch.equal(model(IDS), before)  # one that looks at numbers
        assert torch.equal(model(IDS), before)  # one that torch's profiler records
    assert torch.equal(model(IDS), before)
    assert all("forward" not in vars(module) for module in model.modules())
    assert profiler.results()[1].calls_ms or profiler.results()[1].passes  # what was seen stays


def test_gradients_are_the_same_to_the_last_bit(model):
    def gradients():
        for _ in range(2):
            model.zero_grad()
            model.loss(IDS).backward()
        return [p.grad.clone() for p in model.parameters()]

    before = gradients()
    with LayerProfiler(model, EACH):
        within = gradients()
    assert all(torch.equal(a, b) for a, b in zip(before, within, strict=True))


@torch.inference_mode()
def test_standard_times_every_module_and_summarizes_now_and_then(model):
    config = ProfilingConfig.custom(every_kth_token=3, every_nth_layer=2, near_zero=0.05)
    outputs = []
    model.blocks[2].mlp.down.register_forward_hook(lambda m, i, out: outputs.append(out))
    with LayerProfiler(model, config) as profiler:
        for _ in range(7):
            model(IDS)
    found = {row.name: row for row in profiler.results()}
    assert found["rope"].inside == "blocks.0.attention"
    assert "blocks.1.mlp.down" not in found and found["blocks.1"].kind == "block"
    down = found["blocks.2.mlp.down"]
    assert (len(down.calls_ms), len(found["blocks.2"].calls_ms)) == (3, 7)
    assert {name: len(values) for name, values in down.values.items()} == dict.fromkeys(
        STATISTICS, 3
    )
    x = outputs[0]
    expected = [x.abs().mean(), x.std(), x.abs().max(), (x.abs() < 0.05).float().mean()]
    first = [down.values[name][0] for name in STATISTICS]
    assert first == pytest.approx([float(value) for value in expected])
    parts = {name for name, row in found.items() if row.inside == "blocks.2"}
    assert parts == {
        f"blocks.2.{part}" for part in ("attention_norm", "attention", "mlp_norm", "mlp")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_output_is_summarized_by_an_even_sample_and_the_largest_of_all(dtype):
    g = torch.Generator().manual_seed(0)
    large, small = (torch.randn(size, generator=g).to(dtype) + 3 for size in ((7, 1001), (5, 9)))
    large[3, 500] = -77.0  # between two elements of the sample
    outputs = {"large": large, "small": small.t(), "one": torch.ones(1, dtype=dtype)}
    samples = {name: sample_of(out) for name, out in outputs.items()}
    found = {(name, statistic): x for name, statistic, x in summarize(samples, near_zero=0.5)}
    one = torch.ones(2)
    for name, x in {"large": large.flatten()[::4], "small": small, "one": one}.items():
        x, largest = x.double(), outputs[name].abs().max()
        expected = [x.abs().mean(), x.std(), largest, (x.abs() < 0.5).double().mean()]
        told = [found[name, statistic] for statistic in STATISTICS]
        assert told == pytest.approx([float(value) for value in expected], rel=1e-4, abs=1e-6)


def test_everything_is_put_back_when_the_model_raises(model):
    with pytest.raises(BadInput), LayerProfiler(model, EACH):
        model(torch.zeros(1, 65, dtype=torch.int64))
    replaced = {name for module in model.modules() for name in vars(module)}
    assert not {"forward", "prefill", "decode"} & replaced
    assert not torch.overrides._get_current_function_mode_stack()
    with (
        LayerProfiler(model, EACH) as profiler,
        torch.inference_mode(),
    ):  # and within one that goes on
        with pytest.raises(BadInput):
            model(torch.zeros(1, 65, dtype=torch.int64))
        model(IDS)
        model(IDS)
    assert len(profiler.results()[1].passes) == 1


@torch.inference_mode()
def test_deep_statistics_are_those_of_the_models_own_attention(model):
    seen, inputs = [], {}
    for name in ("mlp.down", "mlp_norm", "attention_norm"):
        note = lambda m, args, out, name=name: inputs.update({name: (args[0], out)})  # noqa: E731
        model.blocks[0].get_submodule(name).register_forward_hook(note)
    config = ProfilingConfig.custom(deep_profiling=True, every_kth_token=1, near_zero=0.08)
    with AttentionWatch(seen.append), LayerProfiler(model, config) as profiler:
        model(IDS)
    layer = next(layer for layer in profiler.results() if layer.name == "blocks.0")
    found = {name: sum(values) / len(values) for name, values in layer.values.items()}
    q, k = (seen[0][name].double() for name in ("query", "key"))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    p = torch.softmax(scores, dim=-1)
    unmasked = p[mask.expand_as(p)]
    norms = (inputs["attention_norm"], inputs["mlp_norm"])
    ratios = [out.var(-1).mean() / x.var(-1).mean() for x, out in norms]
    expected = {
        "attention_entropy": torch.special.entr(p).sum(-1).mean(),
        "attention_max_weight": p.amax(-1).mean(),
        "attention_sparsity": (unmasked < 0.08).double().mean(),  # the masked half is not in it
        "mlp_kill_ratio": (inputs["mlp.down"][0].abs() < 0.08).double().mean(),
        "norm_variance_ratio": sum(ratios) / 2,
    }
    assert 0 < expected["attention_sparsity"] < 1
    assert {name: found[name] for name in expected} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-4
    )


_MASK = torch.rand(3, 7, generator=torch.Generator().manual_seed(1)) > 0.3
_MASK[:, 0] = True


@pytest.mark.parametrize(
    ("lengths", "arguments", "sampled"),
    [
        ((3, 7), {"attn_mask": _MASK}, 1),
        ((3, 7), {"attn_mask": _MASK[:1]}, 1),  # of all queries alike
        ((3, 7), {"attn_mask": torch.where(_MASK, 0.0, float("-inf")), "scale": 0.3}, 1),
        ((3, 7), {}, 1),
        ((200, 200), {"is_causal": True}, 4),
    ],
)
@torch.inference_mode()
def test_weights_looked_at_are_those_of_the_fused_kernel(lengths, arguments, sampled):
    g = torch.Generator().manual_seed(1)
    sizes = zip((4, 2, 2), (lengths[0], lengths[1], lengths[1]), strict=True)
    q, k, v = (torch.randn(2, heads, length, 8, generator=g) for heads, length in sizes)
    seen = []
    with AttentionWatch(seen.append):
        out = scaled_dot_product_attention(q, k, v, **arguments, enable_gqa=True)
    weights, kept = sampled_weights(seen[0])
    expected = out[:, :, ::sampled]
    torch.testing.assert_close(
        weights @ v.repeat_interleave(2, dim=1), expected, atol=1e-6, rtol=1e-5
    )
    if "is_causal" in arguments:
        assert torch.equal(kept[0, 0], torch.ones(lengths, dtype=torch.bool).tril()[::sampled])


@torch.inference_mode()
def test_what_is_seen_goes_to_the_trace_as_it_is_made(model, tmp_path):
    with Store(tmp_path / "results.sqlite") as store:
        store.add(Run(experiment="energy", machine={"machine_id": "m"}, run_id="a"))
        trace = store.new_trace("a", "c")
        config = ProfilingConfig.custom(
            deep_profiling=True, every_kth_token=2, preallocate_metrics=1
        )
        with LayerProfiler(model, config, sink=trace) as profiler:
            for _ in range(5):
                model(IDS)
        store.commit_transaction()
        layers, ops, found = (store.trace(table) for table in ("layers", "ops", "statistics"))
    times = {row.name or "model": row for row in profiler.results()}
    assert set(layers.layer) == set(times) and set(layers.call) == set(range(5))
    plain = layers[layers.call.isin([0, 1, 3, 4]) & (layers.layer == "blocks.1")]
    assert plain.ns.to_list() == [round(1e6 * ms) for ms in times["blocks.1"].calls_ms]
    assert set(ops.call) == {2} and {"gate", "norm", FUSED} < set(ops.op) and ops.ns.min() > 0
    block = found[(found.layer == "blocks.1") & (found.call == 0)]
    assert {*STATISTICS, "attention_entropy", "mlp_kill_ratio"} < set(block.statistic)
    down = found[(found.layer == "blocks.1.mlp.down") & (found.statistic == "sd")]
    assert down.value.to_list() == pytest.approx(times["blocks.1.mlp.down"].values["sd"])
