"""Hugging Face's Llama with the weights of one of ours: an independent implementation."""

from torch import nn

from nanolib.models.transformer import Transformer
from nanolib.models.user import build_model

_LLAMA_NAMES = {
    "blocks": "model.layers",
    "embedding": "model.embed_tokens",
    ".attention.out_proj": ".self_attn.o_proj",
    ".attention.": ".self_attn.",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "gate.": "gate_proj.",
    "up.": "up_proj.",
    "down.": "down_proj.",
    "head.": "lm_head.",
}


def llama_like(model: Transformer) -> nn.Module:
    """Hugging Face's Llama with the same shape and a copy of the weights: both compute the same.

    Args:
        model: Dense, with RoPE and SwiGLU.

    Raises:
        Unsupported: transformers is not installed.
    """
    config = model.config
    options = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": config.tie_embeddings,
    }
    device = model.embedding.weight.device
    llama = build_model("hf:LlamaForCausalLM", options, device, config.dtype)
    weights = {}
    for name, x in model.state_dict().items():
        for ours, theirs in _LLAMA_NAMES.items():
            name = name.replace(ours, theirs)
        weights["model.norm.weight" if name == "norm.weight" else name] = x
    llama.load_state_dict(weights)
    return llama.train(model.training)
