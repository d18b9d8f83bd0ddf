"""A plan counts a few blocks of a stack, and gives the same peak as counting all of them."""

import contextlib

import pytest

from nanolib.experiments import ALL
from nanolib.experiments.model import look
from nanolib.experiments.model.case import GenerationCase, LossCase, ModelCase
from nanolib.models.optimize import OPTIMIZATIONS, applies, is_compiled
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run import memory_plan

MODES = ("inference", "training", "generation")


@contextlib.contextmanager
def _whole(monkeypatch):
    """Everything is counted."""
    with monkeypatch.context() as patch:
        patch.setattr(memory_plan, "_PLANS", {})
        patch.setattr(look, "_LOOKS", {})
        patch.setattr(memory_plan, "_LOW", 10**6)
        yield


SMALL = {"num_layers": 6, "d_model": 64, "num_heads": 4, "vocab_size": 512}


def _model(mode, optimization="eager", overrides=SMALL, shape=(24, 2)):
    shape = ("decoder_small", overrides, "dense", *shape, "float32", mode, optimization)
    kind, more = (GenerationCase, {"new_tokens": 3}) if mode == "generation" else (ModelCase, {})
    return kind("cpu", "a model", *shape, **more)


# planned as the eager model
AS_EAGER = {name for name in OPTIMIZATIONS if is_compiled(name)} | {"cuda_graph"}


@pytest.mark.parametrize("optimization", sorted(set(OPTIMIZATIONS) - AS_EAGER))
def test_a_high_stack_is_planned_from_two_low_ones(monkeypatch, optimization):
    for mode in MODES:
        if not applies(optimization, mode, "float32"):
            continue
        case = _model(mode, optimization)
        quick = case.plan()
        with _whole(monkeypatch):
            assert quick.peaks and quick == case.plan(), mode


@pytest.mark.parametrize("mode", MODES)
def test_where_weights_outweigh_activations_the_peak_of_a_high_stack_is_elsewhere(
    monkeypatch, mode
):
    """Of two blocks the output's is the most, of many the gradients' at the end."""
    overrides = {"num_layers": 11, "d_model": 256, "num_heads": 4, "vocab_size": 8192}
    case = _model(mode, overrides=overrides, shape=(8, 1))
    quick = case.plan()
    with _whole(monkeypatch):
        assert quick == case.plan()


@pytest.mark.parametrize("name", [name for name in ALL if name != "summary"])
def test_listing_the_full_cases_plans_none(monkeypatch, name):
    monkeypatch.setattr(memory_plan, "fake_tensors", lambda *_: pytest.fail("it was planned"))
    monkeypatch.setattr(look, "_look", lambda _: pytest.fail("it was planned"))
    experiment = ALL[name]()
    params = experiment.Params(**read_yaml(checkout() / "params" / "full" / f"{name}.yml"))
    assert len(experiment.cases(params)) > 10


def test_a_training_for_its_loss_is_planned_as_the_training_it_is():
    shape = ("gpt_6.7B", SMALL, "dense", 24, 2, "float32")
    loss = LossCase("cpu", "its loss", *shape, steps=3, learning_rate=1e-3, corpus="")
    assert (
        loss.plan() == ModelCase("cpu", "a model", *shape, "training").plan() and loss.plan().most
    )
