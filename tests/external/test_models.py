"""Published sizes of models: parameters, KV caches and FLOPs."""

import pytest

from nanolib import NanoConfig
from nanolib.meters.flops import model_flops
from nanolib.models.transformer import KVCache
from nanolib.models.user import build_model

# Sizes as their authors' configurations give them, and the number of parameters that each model's
# page states, from the headers of its weight files (huggingface.co, 2023-2025).
FIELDS = ("d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
MODELS = {
    "Llama 2 7B": ((4096, 11008, 32, 32, 32, 32000), 6_738_415_616),
    "Llama 2 70B": ((8192, 28672, 80, 64, 8, 32000), 68_976_648_192),
    "Llama 3 8B": ((4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "Llama 3.1 405B": ((16384, 53248, 126, 128, 8, 128256), 405_853_388_800),
    "Llama 3.2 1B": ((2048, 8192, 16, 32, 8, 128256), 1_235_814_400),
    "Mistral 7B": ((4096, 14336, 32, 32, 8, 32000), 7_241_732_096),
    "SmolLM2 135M": ((576, 1536, 30, 9, 3, 49152), 134_515_008),
}
TIED = {"Llama 3.2 1B", "SmolLM2 135M"}  # their head is their embedding


def config_of(name, **changes):
    shape, _ = MODELS[name]
    sizes = dict(zip(FIELDS, shape, strict=True))
    return NanoConfig(**sizes, tie_embeddings=name in TIED, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name):
    assert config_of(name).parameter_count == MODELS[name][1]


# Source: configurations and weight files of these models, or of the class's defaults
# (huggingface.co, 2019-2025). The class of Qwen 3 with experts declares no head_dim; without it
# there are 30.08 billion.
EXPERTS = {"hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128}
EXPERTS |= {"moe_intermediate_size": 768, "num_experts": 128, "vocab_size": 151936}
HUGGING_FACE = {
    "GPT2": ({}, 124_439_808),
    "Mixtral": ({}, 46_702_792_704),
    "Qwen3Moe": (EXPERTS, 30_532_122_624),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_parameters_of_models_of_transformers_are_as_many_as_published(name):
    options, published = HUGGING_FACE[name]
    model = f"hf:{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}"
    weights = build_model(model, options, "meta", "bfloat16").parameters()
    assert sum(weight.numel() for weight in weights) == published


# Source: bytes of keys and values per token in 16 bits, 2 · layers · kv_heads · head_dim · 2:
# Touvron et al. (2023), Llama 2, table 18 and appendix A.2.1; Llama 3 (2024), table 3.
KIB_PER_TOKEN = {
    "Llama 2 7B": 512,
    "Llama 2 70B": 320,
    "Llama 3 8B": 128,
    "Llama 3.1 405B": 504,
    "Llama 3.2 1B": 32,
}


@pytest.mark.parametrize(("name", "kib_per_token"), KIB_PER_TOKEN.items())
def test_a_token_takes_as_many_bytes_of_cache_as_published(name, kib_per_token):
    cache = KVCache(config_of(name, dtype="bfloat16", context_length=8), 1, 8, "meta")
    assert sum(tensor.nbytes for tensor in cache.tensors) == 8 * kib_per_token * 1024


# Source: karpathy/nanoGPT, transformer_sizing.ipynb: GPT-2 124M over 1,024 tokens, forward, a
# multiply-add as two.
def test_the_flops_of_gpt_2_are_those_of_nanogpts_sizing():
    sizes = {"d_model": 768, "d_ff": 4 * 768, "num_layers": 12, "num_heads": 12}
    rest = {"vocab_size": 50257, "context_length": 1024, "mlp": "gelu", "tie_embeddings": True}
    full = model_flops(NanoConfig(**sizes, **rest), 1, 1024, 1024**2)
    assert full["attention"] == 12 * (1_610_612_736 + 1_610_612_736)  # scores, and their values
    assert full["projections"] == 12 * (3_623_878_656 + 1_207_959_552)
    assert full["mlp"] == 12 * (4_831_838_208 + 4_831_838_208)
    assert full["head"] == 79_047_426_048
    assert full["total"] == 291_648_307_200
    # with the backward pass at twice the forward: the notebook's total of one iteration
    assert 3 * full["total"] == 874_944_921_600


# Source: Chowdhery et al. (2022), PaLM, appendix B: 6 N + 12 · layers · heads · head_dim · length
# FLOPs per token and training step, without the embedding's gathering.
@pytest.mark.parametrize("name", ["Llama 2 7B", "Llama 3 8B", "Mistral 7B"])
@pytest.mark.parametrize("length", [512, 4096])
def test_the_flops_of_training_are_palms_formula(name, length):
    config = config_of(name, context_length=length)
    multiplied = MODELS[name][1] - config.vocab_size * config.d_model  # the embedding is looked up
    multiplied -= (2 * config.num_layers + 1) * config.d_model  # norms multiply by element
    palm = 6 * multiplied + 12 * config.num_layers * config.d_model * length
    ours = 3 * model_flops(config, 1, length, length**2)["total"]
    assert ours == palm * length
