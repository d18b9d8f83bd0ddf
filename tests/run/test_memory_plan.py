"""Memory plans agree with the measured memory of each kind, and a low stack predicts a high one."""

import dataclasses
import functools
import re

import pytest
import torch

from nanolib.experiments import ALL
from nanolib.experiments.model import cases as model
from nanolib.experiments.model import look
from nanolib.experiments.model.case import GenerationCase, ModelCase
from nanolib.measurement import MemoryKind, Status, exact
from nanolib.models.optimize import OPTIMIZATIONS, is_compiled
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run import memory_plan
from tests.experiments.own import LLAMA, TINY
from tests.measuring import breakdown, timed_alone

SMALL = {"num_layers": 4, "d_model": 64, "num_heads": 4, "vocab_size": 512}
# With two blocks the peak is at the output, with many it is at the last gradients.
HEAVY = {"num_layers": 11, "d_model": 256, "num_heads": 4, "vocab_size": 8192}
# These optimizations have the plan of the eager model.
AS_EAGER = {name for name in OPTIMIZATIONS if is_compiled(name)} | {"cuda_graph"}
PARAMS = model.Params(budget_s=0.01, rel_ci=0.5, device="cpu")


def _case(
    mode="training", optimization="eager", preset="decoder_tiny", overrides=TINY, shape=(48, 8)
):
    kind, more = (GenerationCase, {"new_tokens": 3}) if mode == "generation" else (ModelCase, {})
    shape = ("own" if ":" in preset else "dense", *shape, "float32")
    return kind("cpu", preset, preset, overrides, *shape, mode, optimization, **more)


@pytest.mark.parametrize(
    ("mode", "optimization", "overrides", "shape"),
    [
        *((mode, "eager", SMALL, (48, 8)) for mode in ("inference", "generation")),
        *(("training", name, SMALL, (48, 8)) for name in sorted(set(OPTIMIZATIONS) - AS_EAGER)),
        ("training", "eager", HEAVY, (8, 1)),
    ],
)
def test_a_high_stack_is_planned_from_two_low_ones(
    monkeypatch, mode, optimization, overrides, shape
):
    case = _case(mode, optimization, overrides=overrides, shape=shape)
    quick = case.plan()
    monkeypatch.setattr(memory_plan, "_PLANS", {})
    monkeypatch.setattr(look, "_LOOKS", {})
    monkeypatch.setattr(look, "_STACKS", {})
    monkeypatch.setattr(memory_plan, "_LOW", 10**6)  # plan the whole stack
    assert quick.peaks and quick == case.plan()


@pytest.mark.parametrize("name", [name for name in ALL if name != "summary"])
def test_listing_the_full_cases_plans_none(monkeypatch, name):
    monkeypatch.setattr(memory_plan, "fake_tensors", lambda *_: pytest.fail("it was planned"))
    monkeypatch.setattr(look, "_look", lambda _: pytest.fail("it was planned"))
    experiment = ALL[name]()
    params = experiment.Params(**read_yaml(checkout() / "params" / "full" / f"{name}.yml"))
    assert len(experiment.cases(params)) > 10


def _memory(case):
    rows = list(timed_alone(case.measure(PARAMS, {})))
    peaks = {row.scope: row for row in rows if row.metric == "peak_memory"}
    return peaks, [row for row in rows if row.metric == "memory_part"]


@pytest.mark.parametrize(
    "case",
    [
        *map(_case, ("inference", "training", "generation")),
        _case(optimization="autocast_bfloat16_checkpoint"),
        _case(preset="hf:LlamaForCausalLM", overrides=LLAMA),
    ],
    ids=lambda case: f"{case.preset} {case.mode} {case.optimization}",
)
def test_parts_add_up_to_the_peak_and_are_stored_with_their_plan(case):
    peaks, parts = _memory(case)
    for scope, peak in peaks.items():
        own = [row for row in parts if row.scope.startswith(f"{scope}: ")]
        assert {row.scope.partition(": ")[2] for row in own} <= set(MemoryKind)
        assert sum(row.estimate for row in own) == peak.estimate
        assert sum(part[-1] for part in peak.details["parts"]) == peak.estimate * 2**20
        assert sum(row.predicted for row in own) == pytest.approx(peak.predicted)
        assert peak.estimate == pytest.approx(peak.predicted, rel=0.05)
        assert max(peak.details["phases"].values()) == peak.estimate * 2**20
    if case.mode == "training":
        details = peaks["training_step"].details
        assert set(details["phases"]) == {"forward", "backward", "optimizer_step"}
        lines = [part[3] for part in details["parts"] if part[0] == MemoryKind.SAVED]
        assert lines and all(re.fullmatch(r"[^/]*:\d+", line) for line in lines)


def test_a_tokens_peak_is_its_plan_wherever_decoding_is():
    """Sparse attention in float32 copies the cache unless it is full."""
    options = {"pattern": "window", "window": 8, "block_size": 8}
    case = _case("generation", overrides=TINY | {"attention_options": options})
    case = dataclasses.replace(case, attention_type="sparse")
    step, plan = case.step(case.build(0), case.no_ids(), 1e-3), case.plan()
    prefill, decode = step.workloads()
    prefill.call()
    for _ in range(3):
        for peak, *_ in (
            memory_plan.breakdown_rows(decode, step.model, "cpu", plan, None),
            memory_plan.memory_rows(decode, "cpu", plan),
        ):
            assert peak.estimate == peak.predicted
        decode.call()


@pytest.mark.slow
def test_of_a_compiled_model_only_the_resident_memory_is_measured(monkeypatch):
    # The backend makes no difference, because no kernel is counted.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    peaks, parts = _memory(_case("inference", "compile"))
    assert peaks["inference"].status is Status.UNSUPPORTED and not parts
    assert peaks["inference"].message.endswith("see resident_memory")


def test_what_a_gpus_allocator_holds_beyond_the_tensors_is_its_own_part(monkeypatch):
    """The allocator is simulated, and the tensors are on the CPU."""
    work, model = next(_case().at_depth(0).workloads()), torch.nn.Module()
    work.call()
    live = breakdown(work, model).peak

    def measured(call, **_):
        call()
        peak = exact("peak_memory", (live + 512) / 2**20, method="cuda_allocator", details={})
        return [peak, exact("reserved_memory", 9.0)]

    monkeypatch.setattr(memory_plan, "measure_memory", measured)
    peak, _, *parts = memory_plan.breakdown_rows(work, model, "cuda:0", _case().plan(), None)
    beyond = next(row for row in parts if row.scope.endswith(f": {MemoryKind.UNATTRIBUTED}"))
    assert (beyond.estimate, beyond.predicted) == (512 / 2**20, None)
    assert sum(row.estimate for row in parts) == peak.estimate
