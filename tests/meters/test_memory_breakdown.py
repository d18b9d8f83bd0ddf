"""Memory use: parts add up to the peak of `LiveBytes`, saved activations to what autograd says."""

import contextlib

import pytest
import torch

from nanolib.config import NanoConfig
from nanolib.experiments.model.steps import Training
from nanolib.measurement import MemoryKind
from nanolib.meters.memory_breakdown import MemoryTracker
from nanolib.models import create_model
from nanolib.models.user import build_model
from tests.experiments.own import LLAMA

SMALL = {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 128, "context_length": 64}


MODELS = {
    "decoder": lambda: create_model(NanoConfig.from_preset("decoder_tiny", **SMALL)),
    "hf": lambda: build_model("hf:LlamaForCausalLM", LLAMA, "cpu", "float32"),
}


def _step(model):
    return Training(model, torch.zeros(2, 33, dtype=torch.int64), "eager")


@contextlib.contextmanager
def _counting(model, work):
    with MemoryTracker(model) as counter, counter.follow_modules():
        for kind, tensors in work.kinds().items():
            counter.track_existing(kind, tensors)
        yield counter


def test_gradients_and_states_are_as_large_as_weights():
    model = MODELS["decoder"]()
    work = _step(model)
    work.call()
    weights = sum(p.nbytes for p in model.parameters())
    with _counting(model, work) as counter:
        work.forward()
        work.backward()
        counter.begin("after")
        work.optimizer_step()
    after = counter.breakdowns()["after"].bytes_by_kind
    assert after[MemoryKind.GRADIENTS] == weights
    # AdamW counts its steps too
    assert after.get(MemoryKind.STATES, 0) == pytest.approx(2 * weights, rel=0.001)


@pytest.mark.parametrize("name", list(MODELS))
def test_saved_activations_are_what_autograd_saves(name):
    model = MODELS[name]()
    work = _step(model)
    given = {x.untyped_storage()._cdata for x in work.existing()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            saved[storage._cdata] = storage  # it stays alive, so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work.forward()
    alone = sum(storage.nbytes() for storage in saved.values())
    work._loss = torch.zeros(())
    with _counting(model, work) as counter:
        work.forward()
        counter.begin("saved")
    assert counter.breakdowns()["saved"].bytes_by_kind[MemoryKind.SAVED] == alone
