"""Models that are small enough for a test, and what is planned of one."""

import torch
from torch import nn

from nanolib.experiments.model.planning import Request

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


class Small(nn.Module):
    """A model as a user writes one."""

    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.mixing = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, 256)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.mixing(self.embedding(ids))))
