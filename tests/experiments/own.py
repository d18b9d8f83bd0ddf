"""Models that are small enough for a test, and what is planned of one."""

from nanolib import NanoConfig, create_model
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.planner import Request

TINY = {"num_layers": 3, "d_model": 64, "num_heads": 4, "vocab_size": 300, "context_length": 64}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
}


def checked(model, seq_len, batch_size, options, **rest):
    """What a plan is asked: a model in float32 throughout, if nothing else is said."""
    shape = {"memory": "20MiB", "seq_len": seq_len, "batch_size": batch_size}
    return Request(model=model, options=options, **shape | {"precision": "pure"} | rest)


def case(
    mode="training",
    preset="decoder_tiny",
    overrides=TINY,
    shape=(48, 8),
    attention_type="dense",
    dtype="float32",
    optimization="eager",
    new_tokens=3,
):
    """A case of a preset or of a model of one's own, with `shape` tokens and sequences."""
    shape = ("own" if ":" in preset else attention_type, *shape, dtype)
    return ModelCase("cpu", preset, preset, overrides, *shape, mode, optimization, new_tokens)


def tiny(seed=0, **changes):
    """A decoder with small sizes, of which some may change."""
    return create_model(NanoConfig(**TINY | changes), seed=seed)


def build(**options):
    """A model that nanolib builds, as a function of the user."""
    return create_model(NanoConfig(**options))
