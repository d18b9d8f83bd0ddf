"""A plan counts a few blocks of a stack, and a few turns of a loop: what it says is what counting all of them says."""

import contextlib

import pytest

from nanolib.experiments import ALL
from nanolib.experiments.model import look
from nanolib.experiments.model.case import GenerationCase, ModelCase
from nanolib.experiments.model.loss_case import LossCase
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


def _model(preset, optimization, mode, dtype, num_layers):
    overrides = {"num_layers": num_layers, "d_model": 64, "num_heads": 4, "vocab_size": 512}
    shape = ("cpu", "a model", preset, overrides, "dense", 24, 2, dtype, mode, optimization)
    return GenerationCase(*shape, new_tokens=3) if mode == "generation" else ModelCase(*shape)


# planned as the eager model
AS_EAGER = {name for name in OPTIMIZATIONS if is_compiled(name)} | {"cuda_graph"}


@pytest.mark.parametrize(
    ("preset", "optimization"),
    [
        pytest.param(
            preset,
            name,
            marks=[pytest.mark.thorough] * (preset != "decoder_small" and name != "checkpoint"),
        )
        for preset in ("decoder_small",)
        for name in sorted(set(OPTIMIZATIONS) - AS_EAGER)
    ],
)
def test_a_high_stack_is_planned_from_two_low_ones(monkeypatch, preset, optimization):
    for mode in MODES:
        if not applies(optimization, mode, "float32"):
            continue
        case = _model(preset, optimization, mode, "float32", 6)
        quick = case.plan()
        with _whole(monkeypatch):
            assert quick.peaks and quick == case.plan(), mode


@pytest.mark.parametrize("mode", MODES)
def test_where_weights_outweigh_activations_the_peak_of_a_high_stack_is_elsewhere(
    monkeypatch, mode
):
    """Of two blocks the output's is the most, of many the gradients' at the end."""
    overrides = {"num_layers": 11, "d_model": 256, "num_heads": 4, "vocab_size": 8192}
    shape = ("cpu", "a model", "decoder_small", overrides, "dense", 8, 1, "float32", mode, "eager")
    case = GenerationCase(*shape, new_tokens=3) if mode == "generation" else ModelCase(*shape)
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
    overrides = {"num_layers": 6, "d_model": 64, "num_heads": 4, "vocab_size": 512}
    shape = ("gpt_6.7B", overrides, "dense", 24, 2, "float32")
    loss = LossCase("cpu", "its loss", *shape, steps=3, learning_rate=1e-3, corpus="")
    assert (
        loss.plan() == ModelCase("cpu", "a model", *shape, "training").plan() and loss.plan().most
    )
