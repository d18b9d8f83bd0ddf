"""Tensors without data do, and refuse, what those with data would: plans of models that others wrote rest on it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nanolib.experiments.model.steps import Inferring, Training
from nanolib.meters.fakes import NotPlanned, OutOfTable, why_unknown
from nanolib.meters.memory import fake_tensors
from nanolib.run.workload import holding

WIDTH = 32


class Around(nn.Module):
    """A layer between an embedding and logits."""

    def __init__(self, layer, transposed=False):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(256, WIDTH), layer, nn.Linear(WIDTH, 256)
        self.transposed = transposed

    def forward(self, ids):
        x = self.embed(ids)
        x = self.layer(x.transpose(1, 2)).transpose(1, 2) if self.transposed else self.layer(x)
        return self.out(x[0] if isinstance(x, tuple) else x)


def _encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True), 2)


def _tied():
    model = Around(nn.Linear(WIDTH, WIDTH))
    model.out.weight = model.embed.weight
    return model


MODELS = {
    "normalised over a transposed input": lambda: Around(nn.BatchNorm1d(WIDTH), transposed=True),
    "copied layers": lambda: Around(_encoder()),
    "a copy of a tied one": lambda: copy.deepcopy(_tied()),
    "moved to another type": lambda: _tied().double(),
    "moved, a recurrent layer": lambda: Around(nn.GRU(WIDTH, WIDTH, batch_first=True)).double(),
    "dropout": lambda: Around(nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))),
}


def _peak(name, training):
    model, ids = MODELS[name](), torch.zeros(3, 25, dtype=torch.int64)
    step = Training(model, ids, "eager", 1e-3) if training else Inferring(model, ids[:, :-1], "eager")
    (work,) = step.workloads()
    return holding(work, model).parts


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_is_what_is_measured_part_by_part(name, training):
    measured = _peak(name, training)
    with fake_tensors():
        assert _peak(name, training) == measured


def test_a_model_is_left_to_torch_where_no_tensor_is_without_data():
    torchs = nn.Module._apply, torch.Tensor.__deepcopy__
    with fake_tensors():
        assert nn.Module._apply is not torchs[0]
    assert (nn.Module._apply, torch.Tensor.__deepcopy__) == torchs


def test_what_a_recurrent_layer_keeps_for_its_gradient_is_not_planned_and_its_forward_pass_is():
    model, ids = Around(nn.LSTM(WIDTH, WIDTH, batch_first=True)), torch.zeros(1, 8, dtype=torch.int64)
    (work,) = Inferring(model, ids, "eager").workloads()
    measured = holding(work, model).peak
    with fake_tensors():
        model = Around(nn.LSTM(WIDTH, WIDTH, batch_first=True))
        (work,) = Inferring(model, torch.zeros_like(ids), "eager").workloads()
        assert holding(work, model).peak == measured
        with pytest.raises(NotPlanned, match="recurrent layers keep for the backward pass"):
            model.train()(torch.zeros_like(ids))


@pytest.mark.parametrize(
    "look_up",
    [F.embedding, lambda i, table: table[i], lambda i, table: table.index_select(0, i.flatten())],
    ids=["embedding", "index", "index_select"],
)
def test_what_is_out_of_a_table_is_refused_as_with_data(look_up):
    for rows, positions in ((16, lambda: torch.arange(17)), (16, lambda: torch.arange(64)[:, None].expand(64, 2))):
        with pytest.raises(IndexError):
            look_up(positions(), torch.ones(rows, 2))
        with fake_tensors(), pytest.raises(OutOfTable, match="out of the model's table of 16"):
            look_up(positions(), torch.ones(rows, 2))
    for positions in (
        lambda: torch.arange(64)[:16],
        lambda: torch.arange(0, 30, 2).clone(),
        lambda: torch.arange(64) % 16,
        lambda: torch.arange(64).clamp_(max=15),
    ):
        assert max(positions()) < 30
        table = torch.ones(29, 2)
        look_up(positions(), table)
        with fake_tensors():
            look_up(positions(), torch.ones(29, 2))


def test_ids_of_a_text_are_any_byte_until_they_are_changed():
    with fake_tensors() as mode:
        ids, table = torch.zeros(2, 9, dtype=torch.int64), torch.ones(65, 4)
        F.embedding(ids, table)
        mode.holds_ids(ids, 256)
        for read in (ids, ids[:, :-1], ids[:, 1:].flatten()):
            with pytest.raises(OutOfTable, match=r"id 255 .* vocabulary of 256 or more"):
                F.embedding(read, table)
        F.embedding(ids % 65, table)
        with pytest.raises(OutOfTable, match="logits of 65"):
            F.cross_entropy(torch.ones(16, 65), ids[:, 1:].flatten())


def test_two_types_are_not_multiplied():
    def product():
        return F.linear(torch.ones(2, 3, dtype=torch.float64), torch.ones(4, 3))

    with pytest.raises(RuntimeError):
        product()
    with fake_tensors(), pytest.raises(RuntimeError, match="float64 and float32"):
        product()


def test_what_asks_for_data_is_told_in_words():
    with fake_tensors():
        x = torch.ones(3)
        for ask in (lambda: int(x.sum()), lambda: x[x > 0]):
            with pytest.raises(RuntimeError) as told:
                ask()
            assert why_unknown(told.value).startswith("what it does depends on its data, which a plan does not have")
    assert why_unknown(ValueError("a\nb")) == "ValueError: a b"
