"""Results that do not depend on random numbers, on the length of a cache, or on other ranks."""

import pytest
import torch
from torch import nn

from nanolib.experiments.model.steps import Training
from nanolib.models import attention
from nanolib.models.attention.dynamic import _stand_out
from tests.models.inputs import qkv


class Dropping(nn.Module):
    """A model with dropout, and with a weight that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 16), nn.Linear(16, 300)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids):
        return nn.functional.dropout(self.head(self.embedding(ids)), 0.5, self.training), "more"


def test_a_model_that_draws_random_numbers_is_not_compared(monkeypatch):
    step = Training(Dropping(), torch.randint(300, (2, 9)), "autocast_bfloat16")
    assert not [*step.against_eager("autocast_bfloat16")]
    assert [row.metric for row in step.against_eager("compile")] == ["latency"]
    monkeypatch.setattr(nn.functional, "dropout", lambda x, *_: x)
    (row,) = step.against_eager("autocast_bfloat16")
    assert row.method == "loss" and 0 < row.estimate < 0.01
    assert not [*step.against_eager("checkpoint")]


def test_among_equal_scores_dca_chooses_the_earlier_tokens_whatever_the_length():
    scores = torch.zeros(1, 300, dtype=torch.float64)
    scores[0, torch.arange(0, 200, 3)] = 1.0
    known = torch.tensor([[200]])
    short, long = (
        _stand_out(scores[:, :n], known, 5)[0, 0].nonzero().flatten() for n in (200, 300)
    )
    assert short.tolist() == long.tolist() == [0, 3, 6, 9, 12]


def test_a_second_derivative_of_sparse_attention_is_refused_not_left_out():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 64, 64, 16))
    options = {"pattern": "window", "window": 16, "block_size": 16}
    out = attention.attend("sparse", q, k, v, causal=True, options=options)
    (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
