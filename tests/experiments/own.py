"""Models that are small enough for a test."""

TINY = {"num_layers": 3, "d_model": 64, "num_heads": 4, "vocab_size": 300, "context_length": 64}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
}
