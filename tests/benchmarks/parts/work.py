"""The copy that a version holds: real work in a hundred equal units, each of them one per cent."""

import torch

from nanolib import NanoConfig, create_model
from nanolib.models.transformer import KVCache

UNITS = 100

torch.manual_seed(0)
_matrix = torch.randn(160, 160)
_config = NanoConfig.from_preset(
    "decoder_tiny", d_model=64, num_heads=2, num_layers=1, vocab_size=256
)
_model = create_model(_config, seed=0).eval()
_PROMPT = 16
_ids = torch.randint(0, 256, (1, _PROMPT))
_cache = KVCache(_config, 1, _PROMPT + 1, "cpu")
with torch.inference_mode():
    _model.prefill(_ids, _cache)


def matmul():
    """A matrix product."""
    for _ in range(UNITS):
        _matrix @ _matrix


@torch.inference_mode()
def block():
    """A decoder block forward."""
    for _ in range(UNITS):
        _model.hidden(_ids)


@torch.inference_mode()
def decode():
    """One token of a decoder with a KV cache."""
    for _ in range(UNITS):
        _cache.length = _PROMPT
        _model.decode(_ids[:, 0], _cache)
