"""A plan counts a few blocks of a stack, and a few turns of a loop: what it says is what counting all of them says."""

import contextlib

import pytest

from nanolib.experiments import ALL
from nanolib.experiments.attention.attention_case import AttentionCase
from nanolib.experiments.model import look
from nanolib.experiments.model.loss_case import LossCase
from nanolib.experiments.model.model_cases import GenerationCase, ModelCase
from nanolib.experiments.model.steps import Training
from nanolib.meters.memory import peak_memory
from nanolib.models.attention import block_sparse
from nanolib.models.attention.choice import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.optimise import OPTIMISATIONS, applies, is_compiled
from nanolib.paths import checkout
from nanolib.run import workload
from nanolib.run.plan import dry_run, helpers
from nanolib.validation import read_yaml

MODES = ("inference", "training", "generation")


@contextlib.contextmanager
def _whole(monkeypatch):
    """Everything is counted."""
    with monkeypatch.context() as patch:
        patch.setattr(workload, "_PLANS", {})
        patch.setattr(look, "_LOOKS", {})
        patch.setattr(workload, "_LOW", 10**6)
        patch.setattr(Training, "_leave_states", Training.__call__)  # by a whole step
        patch.setattr(block_sparse, "FakeTensor", type("NoTensor", (), {}))  # which tells a plan from a call
        yield


def _model(preset, optimisation, mode, dtype, num_layers):
    overrides = {"num_layers": num_layers, "d_model": 64, "num_heads": 4, "vocab_size": 512}
    shape = ("cpu", "a model", preset, overrides, "dense", 24, 2, dtype, mode, optimisation)
    return GenerationCase(*shape, new_tokens=3) if mode == "generation" else ModelCase(*shape)


# planned as the eager model
AS_EAGER = {name for name in OPTIMISATIONS if is_compiled(name)} | {"cuda_graph"}


@pytest.mark.parametrize(
    ("preset", "optimisation"),
    [
        pytest.param(preset, name, marks=[pytest.mark.thorough] * (preset != "decoder_small" and name != "checkpoint"))
        for preset in ("decoder_small",)
        for name in sorted(set(OPTIMISATIONS) - AS_EAGER)
    ],
)
def test_a_high_stack_is_planned_from_two_low_ones(monkeypatch, preset, optimisation):
    for mode in MODES:
        if not applies(optimisation, mode, "float32"):
            continue
        case = _model(preset, optimisation, mode, "float32", 6)
        quick = case.plan()
        with _whole(monkeypatch):
            assert quick.peaks and quick == case.plan(), mode


@pytest.mark.parametrize("optimisation", sorted(AS_EAGER))
def test_what_is_planned_as_eager_says_the_same(optimisation):
    assert _model("small", optimisation, "inference", "float32", 6).plan().peaks
    assert (
        _model("small", optimisation, "inference", "float32", 6).plan()
        == _model("small", "eager", "inference", "float32", 6).plan()
    )


@pytest.mark.parametrize("mode", MODES)
def test_where_weights_outweigh_activations_the_peak_of_a_high_stack_is_elsewhere(monkeypatch, mode):
    """Of two blocks the output's is the most, of many the gradients' at the end."""
    overrides = {"num_layers": 11, "d_model": 256, "num_heads": 4, "vocab_size": 8192}
    shape = ("cpu", "a model", "decoder_small", overrides, "dense", 8, 1, "float32", mode, "eager")
    case = GenerationCase(*shape, new_tokens=3) if mode == "generation" else ModelCase(*shape)
    quick = case.plan()
    with _whole(monkeypatch):
        assert quick == case.plan()


OPTIONS = {
    "window": {"window": 70},
    "local_global": {"window": 70, "global_tokens": 20},
    "bigbird": {"window": 70, "global_tokens": 20, "random_tokens": 20},
    "strided": {"sparsity": 0.8},
    "block": {"sparsity": 0.8},
    "random": {"sparsity": 0.8},
}


@pytest.mark.parametrize(
    ("pattern", "heads", "kv_heads", "causal"),
    [
        pytest.param(pattern, *shape, marks=[pytest.mark.thorough] * ((at + other) % 2))  # each pattern at one of both
        for at, pattern in enumerate(sorted(set(PATTERNS) - set(CHOOSERS)))
        for other, shape in enumerate([(4, 4, True), (4, 2, False)])
    ],
)
def test_a_sparse_plan_from_a_few_blocks_is_that_from_all(monkeypatch, pattern, heads, kv_heads, causal):
    for more in ({}, {"per_head": True}) if pattern == "random" else ({},):
        options = {"pattern": pattern, "block_size": 32, **OPTIONS[pattern], **more}
        case = AttentionCase("cpu", pattern, "sparse", options, 500, 2, "float32", heads, kv_heads, 16, causal, True)
        quick = case.plan()
        with _whole(monkeypatch):
            whole = case.plan()
        assert quick.peaks.keys() == whole.peaks.keys() == {"forward", "forward_backward"}
        for scope, peak in whole.peaks.items():
            assert quick.peaks[scope] == pytest.approx(peak, rel=0.005), (scope, more)


@pytest.mark.parametrize(("batch_size", "kv_heads"), [(1, 4), (3, 2)])
def test_the_plan_of_a_single_block_is_the_live_peak(batch_size, kv_heads):
    options = {"pattern": "window", "window": 70, "block_size": 128}
    case = AttentionCase("cpu", "window", "sparse", options, 100, batch_size, "bfloat16", 4, kv_heads, 16, True, True)
    for work in case.workloads(*case.inputs(0)):
        work.call()
        with peak_memory("cpu", *work.existing()) as peak:
            work.call()
        assert case.plan().peaks[work.scope] == peak.live


@pytest.mark.parametrize("name", [name for name in ALL if name != "summary"])
def test_listing_the_full_cases_plans_none(monkeypatch, name):
    monkeypatch.setattr(workload, "_made_once", lambda *_: pytest.fail("it was planned"))
    monkeypatch.setattr(look, "_look", lambda _: pytest.fail("it was planned"))
    experiment = ALL[name]()
    params = experiment.Params(**read_yaml(checkout() / "params" / "full" / f"{name}.yml"))
    assert len(experiment.cases(params)) > 10


def test_a_training_for_its_loss_is_planned_as_the_training_it_is():
    overrides = {"num_layers": 6, "d_model": 64, "num_heads": 4, "vocab_size": 512}
    shape = ("gpt_6.7B", overrides, "dense", 24, 2, "float32")
    loss = LossCase("cpu", "its loss", *shape, steps=3, learning_rate=1e-3, corpus="")
    assert loss.plan() == ModelCase("cpu", "a model", *shape, "training").plan() and loss.plan().most


def test_helpers_foresee_the_same_in_the_same_order():
    cases = [
        _model("small", name, "inference", "float32", 6) for name in ("eager", "compile", "checkpoint", "cuda_graph")
    ]
    with helpers() as beside:
        assert list(dry_run(cases, {}, beside)) == list(dry_run(cases, {}))
