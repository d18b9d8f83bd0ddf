"""What is counted of a model of one's own: one token's work and traffic, a plan that a run holds to, experts, windows."""

import dataclasses

import pytest

from nanolib.experiments.model import cases as model
from nanolib.experiments.model.case import GenerationCase, ModelCase
from nanolib.experiments.model.planner import Planner
from nanolib.measurement import MemoryKind
from nanolib.meters.flops import model_flops
from nanolib.models.user import hugging_face_config
from tests.experiments.own import checked
from tests.measuring import breakdown, timed_alone

LAYERS, D, HEADS, KV_HEADS, FF, VOCAB = 3, 64, 4, 2, 96, 300
HEAD_DIM, KV = D // HEADS, KV_HEADS * D // HEADS
HF = {
    "hidden_size": D,
    "intermediate_size": FF,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
}
OWN = """
from nanolib import NanoConfig, create_model
def build(**options):
    return create_model(NanoConfig(mlp="swiglu", **options))
"""
MINE = {
    "d_model": D,
    "d_ff": FF,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
}
MINE |= {"vocab_size": VOCAB, "context_length": 2048, "tie_embeddings": False}
MODELS = {"hf:LlamaForCausalLM": HF, "hf:MistralForCausalLM": HF, "mine_for_counts:build": MINE}
EXPERTS = HF | {"num_local_experts": 8, "num_experts_per_tok": 2}
LINEAR = D * D + 2 * D * KV + D * D + 3 * D * FF  # weights of a block's products


@pytest.fixture(autouse=True)
def _mine(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    (tmp_path / "mine_for_counts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def _generation(model, options, n, batch=1, dtype="float32"):
    return GenerationCase(
        "cpu", "m", model, options, "own", n, batch, dtype, "generation", new_tokens=4
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("n", "batch"), [(64, 1), (200, 3)])
def test_one_tokens_flops_and_bytes_are_those_of_a_closed_form(model, n, batch):
    said = _generation(model, MODELS[model], n, batch).formulas()
    seen = n + 1  # the prompt and itself
    assert said["flops"] == batch * (
        LAYERS * (2 * LINEAR + 4 * HEADS * HEAD_DIM * seen) + 2 * D * VOCAB
    )
    norms, cache = (2 * LAYERS + 1) * D, 2 * LAYERS * batch * n * KV
    assert said["bytes"] == 4 * (LAYERS * LINEAR + D * VOCAB + norms + batch * D + cache)


@pytest.mark.parametrize("model", MODELS)
def test_the_plan_of_decoding_holds_one_cache_and_so_does_a_run(model):
    n, item = 256, 4
    planned = Planner(checked(model, n, 1, MODELS[model])).breakdown("decoding", 1, n)
    case = _generation(model, MODELS[model], n - 1)
    cached = (
        n - 1 if model.startswith("hf:") else n
    )  # a cache of fixed size has room for the new token too
    assert planned.by_kind[MemoryKind.CACHE] == 2 * LAYERS * KV_HEADS * HEAD_DIM * cached * item
    case = dataclasses.replace(case, new_tokens=1)
    built = case.build(0)
    found = {
        w.scope: breakdown(w, built) for w in case.step(built, case.no_ids(), 1e-3).workloads()
    }
    assert {scope: held.peak for scope, held in found.items()} == pytest.approx(
        case.plan().peaks, abs=_WINDOWS
    )
    most = max(found.values(), key=lambda held: held.peak)
    assert most.by_kind == pytest.approx(planned.by_kind, abs=_WINDOWS)
    assert most.by_kind[MemoryKind.CACHE] == planned.by_kind[MemoryKind.CACHE]


_WINDOWS = (
    8 * LAYERS
)  # bytes: the size of each layer's window as a tensor, which a run makes out of the counter's sight


@pytest.mark.parametrize("model", MODELS)
def test_what_decoding_needs_beside_weights_and_cache_does_not_grow_with_the_layers(model):
    field = "num_hidden_layers" if model.startswith("hf:") else "num_layers"
    options = {name: value for name, value in MODELS[model].items() if name != "sliding_window"}
    low, high = (
        Planner(checked(model, 256, 1, options | {field: layers}))
        .breakdown("decoding", 1, 256)
        .by_kind
        for layers in (LAYERS, 3 * LAYERS)
    )
    assert high[MemoryKind.TEMPORARIES] == pytest.approx(
        low[MemoryKind.TEMPORARIES], abs=2 * _WINDOWS
    )
    assert high[MemoryKind.CACHE] == 3 * low[MemoryKind.CACHE]


PLANNED = [
    ("hf:LlamaForCausalLM", HF, "float32", 1024),
    ("hf:LlamaForCausalLM", HF, "float32", 2048),
    ("hf:MistralForCausalLM", HF, "float32", 2048),
    ("hf:MistralForCausalLM", HF | {"sliding_window": 256}, "float32", 1024),
    (
        "hf:GPTNeoXForCausalLM",
        {name: HF[name] for name in HF if name != "num_key_value_heads"},
        "float32",
        512,
    ),
    ("hf:MixtralForCausalLM", EXPERTS, "bfloat16", 1024),
    ("hf:MixtralForCausalLM", EXPERTS, "float32", 1024),
]


@pytest.mark.parametrize(("model", "options", "dtype", "n"), PLANNED)
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_plan_is_what_a_run_holds_and_has_no_mask_that_a_run_does_not(
    model, options, dtype, n, mode
):
    case = ModelCase("cpu", "m", model, options, "own", n, 1, dtype, mode)
    built = case.build(0)
    (work,) = case.step(built, case.no_ids(), 1e-3).workloads()
    assert case.plan().peaks[work.scope] == pytest.approx(breakdown(work, built).peak, rel=0.05)


def test_gpt2_counts_its_kept_pairs_next_to_torchs_full_count():
    """The sizes are transformers' defaults, which are nanoGPT's."""
    case = ModelCase("cpu", "m", "hf:GPT2LMHeadModel", {}, "own", 1024, 1, "float32", "inference")
    masked = 12 * 12 * 4 * 64 * (1024 * 1023 // 2)
    assert case.formulas()["flops"] == 291_648_307_200 - masked
    assert case.counted.count.full == 291_648_307_200


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_sliding_window_counts_its_pairs_by_a_run_that_has_the_masks_data(mode):
    n, window = 40, 16
    case = ModelCase(
        "cpu",
        "m",
        "hf:MistralForCausalLM",
        HF | {"sliding_window": window},
        "own",
        n,
        1,
        "float32",
        mode,
    )
    passes = 3 if mode == "training" else 1
    linear = LAYERS * 2 * n * LINEAR + 2 * n * D * VOCAB
    per_pair = LAYERS * 4 * HEADS * HEAD_DIM
    assert case.formulas()["flops"] == passes * (linear + per_pair * n * n)  # an upper bound
    kept = sum(min(i + 1, window) for i in range(n))
    assert case.known({})["flops"] == passes * (linear + per_pair * kept)
    assert case.counted.count.full == passes * (linear + per_pair * n * n)


def test_a_checkpointed_step_has_the_models_flops_and_the_computed_ones():
    n, d, layers = 16, 32, 2
    sizes = {"d_model": d, "d_ff": 64, "num_layers": layers, "num_heads": 2, "vocab_size": 300}
    case = ModelCase(
        "cpu",
        "m",
        "decoder_tiny",
        sizes,
        "dense",
        n,
        1,
        "float32",
        "training",
        "checkpoint",
    )
    rows = timed_alone(case.measure(model.Params(device="cpu", budget_s=0.01), {}))
    flops = {row.method: row.estimate for row in rows if row.metric == "flops"}
    parts = model_flops(case.config, 1, n, lambda q, kv: q * (q + 1) // 2)
    # a block is computed again up to its last product, which its gradient does not need
    again = parts["total"] - parts["head"] - layers * 2 * n * 64 * d
    assert flops == {"kept": 3 * parts["total"], "computed": 3 * parts["total"] + again}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_count(dtype):
    n = 64
    case = ModelCase("cpu", "m", "hf:MixtralForCausalLM", EXPERTS, "own", n, 1, dtype, "training")
    attention = 2 * n * (2 * D * D + 2 * D * KV) + 4 * HEADS * HEAD_DIM * n * (n + 1) // 2
    forward = LAYERS * (attention + 2 * n * D * 8 + 2 * n * 2 * 3 * D * FF) + 2 * n * D * VOCAB
    assert case.formulas()["flops"] == 3 * forward


def test_a_token_reads_the_experts_that_it_can_choose():
    few, all_of_them = (
        _generation("hf:MixtralForCausalLM", EXPERTS, 32, batch, "bfloat16") for batch in (1, 4)
    )
    outside = LAYERS * (2 * D * D + 2 * D * KV + D * 8) + D * VOCAB + (2 * LAYERS + 1) * D
    for case, experts in ((few, 2), (all_of_them, 8)):
        rest = case.batch_size * (D + 2 * LAYERS * 32 * KV)
        assert case.formulas()["bytes"] == 2 * (outside + LAYERS * experts * 3 * D * FF + rest)


def test_weights_that_do_not_learn_have_neither_a_backward_pass_nor_states(tmp_path, monkeypatch):
    (tmp_path / "frozen_for_counts.py").write_text(
        "import torch\n"
        "def build(frozen):\n"
        "    body = [torch.nn.Embedding(256, 32), torch.nn.Linear(32, 32, bias=False)]\n"
        "    body = torch.nn.Sequential(*body).requires_grad_(not frozen)\n"
        "    return torch.nn.Sequential(body, torch.nn.Linear(32, 256, bias=False))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    n, body, head = 16, 32 * 32, 32 * 256
    for frozen, flops, learning in (
        (False, 6 * (body + head), 256 * 32 + body + head),
        (True, 2 * body + 4 * head, head),
    ):
        case = ModelCase(
            "cpu",
            "m",
            "frozen_for_counts:build",
            {"frozen": frozen},
            "own",
            n,
            1,
            "float32",
            "training",
        )
        said = case.formulas()
        assert said["flops"] == n * flops
        assert said["bytes"] == 4 * (2 * said["parameters"] + 8 * learning)


def test_a_token_over_a_window_sees_and_reads_the_window():
    case = _generation("hf:MistralForCausalLM", HF | {"sliding_window": 16}, 40)
    said = case.formulas()
    assert said["flops"] == LAYERS * (2 * LINEAR + 4 * HEADS * HEAD_DIM * 16) + 2 * D * VOCAB
    weights = LAYERS * LINEAR + D * VOCAB + (2 * LAYERS + 1) * D + D
    assert said["bytes"] == 4 * (weights + 2 * LAYERS * 15 * KV)
    assert case.plan().peaks


def test_fields_that_a_models_code_reads_are_taken_though_its_configuration_declares_none():
    small = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    assert hugging_face_config("hf:Qwen3MoeForCausalLM", small).head_dim == 32
