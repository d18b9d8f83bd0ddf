import functools

import pytest
import torch
from torch._dynamo.utils import counters

from nanolib.experiments.model.cases import Params
from nanolib.experiments.model.steps import Inferring, Training
from nanolib.measurement import Unsupported
from nanolib.meters.flops import count_flops
from nanolib.meters.latency import measure_phases
from nanolib.meters.sampler import Timing
from nanolib.models.generation import Generation
from tests.experiments import own


@pytest.fixture
def model():
    return own.tiny(num_layers=2)


@pytest.fixture
def _eager_backend(monkeypatch):
    """Only dynamo's part of compiling is tested."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


IDS = torch.randint(300, (8, 65), generator=torch.Generator().manual_seed(0))


def test_autocast_costs_digits_and_says_how_many(model):
    name = "autocast_bfloat16"
    (logits,) = Inferring(model, IDS[:, :-1], name).against_eager(name)
    assert 1e-4 < logits.estimate < 3e-2


def test_what_cannot_be_checkpointed_says_so():
    with pytest.raises(Unsupported, match="remove checkpoint from optimizations"):
        Training(torch.nn.Embedding(300, 300), IDS, "checkpoint")


@pytest.mark.slow
@pytest.mark.usefixtures("_eager_backend")
def test_compiling_helps_after_a_counter_has_seen_the_model_and_is_done_once_each(model):
    """Under a counter dynamo gives a function up; two timed in turns must not forget each other."""
    torch._dynamo.reset()
    count_flops(Inferring(model, IDS[:, :-1], "compile"))
    steps = [Inferring(model, IDS[:, :-1], "compile") for _ in range(2)]
    counters.clear()
    graphs = []
    for step in steps * 2:
        step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert 0 < graphs[0] < graphs[1] == graphs[2] == graphs[3]


class _Block(torch.nn.Module):
    """It breaks the graph, as a print would."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        x = x * (1 + self.number)
        torch._dynamo.graph_break()
        return torch.relu(x) * self.number


@pytest.mark.usefixtures("_eager_backend")
def test_a_model_of_which_a_part_would_run_uncompiled_is_not_timed_as_compiled():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), *map(_Block, range(5)))
    step = Inferring(model, torch.zeros(1, 4, dtype=torch.int64), "compile")
    refused = pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit)
    with torch._dynamo.config.patch(recompile_limit=4), refused:
        step()
    torch._dynamo.reset()


def test_every_length_of_the_cache_was_met_before_a_token_is_timed(monkeypatch):
    """Kernels may be planned for each length, which does not belong to the time of a token."""
    case = own.case("generation", shape=(8, 1), new_tokens=4)
    case.plan()  # which also generates
    met, decode = [], Generation.decode
    note = lambda self: met.append(self.cache.length) or decode(self)  # noqa: E731
    monkeypatch.setattr(Generation, "decode", note)
    measuring, answer = case.measure(Params(budget_s=1e-9, device="cpu"), {}), None
    while not isinstance(made := measuring.send(answer), Timing) or "decode" not in made.phases:
        assert not met
        answer = measure_phases(made) if isinstance(made, Timing) else None
    assert met == [8, 9, 10, 11]


class Dropping(torch.nn.Module):
    """A model with dropout."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(300, 16), torch.nn.Linear(16, 300)

    def forward(self, ids):
        return torch.nn.functional.dropout(
            self.head(self.embedding(ids)), 0.5, self.training
        ), "more"


def test_a_model_that_draws_random_numbers_is_not_compared(monkeypatch):
    step = Training(Dropping(), torch.randint(300, (2, 9)), "autocast_bfloat16")
    assert not [*step.against_eager("autocast_bfloat16")]
    assert [row.metric for row in step.against_eager("compile")] == ["latency"]
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_: x)
    (row,) = step.against_eager("autocast_bfloat16")
    assert row.method == "loss" and 0 < row.estimate < 0.01
    assert not [*step.against_eager("checkpoint")]
