"""Caches of today's families of transformers: windows, latents, states, or several in one model."""

import pytest
import torch

from nanolib.measurement import MemoryKind
from nanolib.models.generation import generation_of
from nanolib.models.user import build_model
from tests.experiments import own
from tests.measuring import breakdown

N, BATCH = 20, 2
BASE = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
ATTENDS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
ATTENDS |= BASE | {"head_dim": 8, "max_position_embeddings": 128}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
FULL, WINDOW = 2 * 2 * 8 * N, 2 * 2 * 8 * 15  # elements of a layer's keys and values per sequence
TYPES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
# Model → options, elements of keys and values per sequence, whether layers have states too.
FAMILIES = {
    "Mistral": (ATTENDS | {"sliding_window": 16}, 2 * WINDOW, False),
    "Gemma3": (ATTENDS | TYPES, WINDOW + FULL, False),
    "DeepseekV3": (
        ATTENDS
        | {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 16}
        | {
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
        2 * N * (12 + 8),
        False,
    ),
    "Mamba": (BASE | {"state_size": 8}, 0, True),
    "Bamba": (ATTENDS | MAMBA2 | {"attn_layer_indices": [1]}, FULL, True),
    "Qwen3Next": (
        ATTENDS
        | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
        | {"linear_value_head_dim": 8, "moe_intermediate_size": 16, "num_experts_per_tok": 1}
        | {"shared_expert_intermediate_size": 16},
        FULL,
        True,
    ),
    "Lfm2": (ATTENDS | {"layer_types": ["conv", "full_attention"]}, FULL, True),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    return f"hf:{request.param}ForCausalLM", *FAMILIES[request.param]


def test_tokens_are_those_of_generate_and_begin_again_at_the_prompt(family):
    name, options, *_ = family
    model = build_model(name, options, "cpu", "float32", seed=0).eval()
    ids = torch.randint(300, (BATCH, N), generator=torch.Generator().manual_seed(0))
    rest = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(ids, max_new_tokens=4, **rest)[:, N:]
    generation = generation_of(model, ids, 3)
    generation.prefill()
    for _ in range(2):
        found = [generation.token]
        for _ in range(3):
            generation.decode()
            found.append(generation.token)
        assert torch.equal(torch.stack(found, 1), wanted)
        generation.token = wanted[:, 0]
    generation.all_tokens()
    lengths = []
    model.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    for _ in range(4):
        generation.decode()
    assert lengths == [1] * 4  # no token includes a prefill


def test_a_cache_has_the_bytes_of_its_tensors_and_a_plan_is_what_a_run_uses(family):
    name, options, elements, has_states = family
    case = own.case("generation", name, options, (N - 1, BATCH), dtype="bfloat16", new_tokens=2)
    step = case.step(0)
    step.first()
    layers = [vars(layer) for layer in step.generation.cache.layers]
    cached = sum(x[name].numel() for x in layers for name in ("keys", "values") if name in x)
    held = sum(x.nbytes for x in step.kinds()[MemoryKind.CACHE])
    assert cached == BATCH * elements and (held > 2 * cached) == has_states
    found = {work.scope: breakdown(work).peak for work in step.workloads()}
    assert case.plan().peaks == pytest.approx(found, rel=0.05)
