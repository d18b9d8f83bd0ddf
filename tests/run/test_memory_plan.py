"""Memory plans agree with the measured memory of each kind, and a low stack predicts a high one."""

import re
from functools import partial

import pandas as pd
import pytest
import torch

from nanolib.experiments import ALL
from nanolib.experiments.model import cases as model
from nanolib.experiments.model import look
from nanolib.measurement import MemoryKind, Status, exact
from nanolib.meters.memory_breakdown import Part
from nanolib.models.training import OPTIMIZATIONS, is_compiled
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run import memory_plan
from tests.experiments.own import LLAMA, TINY
from tests.experiments.own import case as _case
from tests.measuring import breakdown, timed_alone

SMALL = {"num_layers": 4, "d_model": 64, "num_heads": 4, "vocab_size": 512}
# With two blocks the peak is at the output, with many it is at the last gradients.
HEAVY = {"num_layers": 11, "d_model": 256, "num_heads": 4, "vocab_size": 8192}
# These optimizations have the plan of the eager model.
AS_EAGER = {name for name in OPTIMIZATIONS if is_compiled(name)} | {"cuda_graph"}
PARAMS = model.Params(budget_s=0.01, rel_ci=0.5, device="cpu")


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
    case = _case(mode, optimization=optimization, overrides=overrides, shape=shape)
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


WINDOW = {"attention_options": {"pattern": "window", "window": 8, "block_size": 8}}
EXPERTS = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}
PLANNED = [
    *map(_case, ("inference", "training", "generation")),
    _case(optimization="autocast_bfloat16_checkpoint"),
    _case("generation", overrides=TINY | WINDOW, attention_type="sparse"),
    _case(overrides=TINY | WINDOW, attention_type="sparse"),
    _case(preset="hf:LlamaForCausalLM", overrides=LLAMA),
    _case("inference", preset="hf:LlamaForCausalLM", overrides=LLAMA, shape=(2048, 1)),
    _case(
        preset="hf:MistralForCausalLM", overrides=LLAMA | {"sliding_window": 256}, shape=(512, 1)
    ),
    _case(preset="hf:MixtralForCausalLM", overrides=EXPERTS, shape=(1024, 1), dtype="bfloat16"),
    _case("inference", preset="hf:MixtralForCausalLM", overrides=EXPERTS, shape=(1024, 1)),
    _case("generation", preset="tests.experiments.own:build", overrides=TINY),
]


@pytest.mark.parametrize("case", PLANNED, ids=str)
def test_parts_add_up_to_the_peak_and_the_plan_is_the_peak(case):
    step, plan = case.step(0), case.plan()
    planned = look.record_calls(case).breakdowns(case.batch_size)
    for work in step.workloads():
        peak, _ = memory_plan.breakdown_rows(work, "cpu", plan)
        parts = pd.DataFrame(peak.details["parts"], columns=[*Part._fields, "size"])
        assert parts["size"].sum() == peak.estimate * 2**20
        assert peak.estimate == pytest.approx(peak.predicted, rel=0.05)
        by_kind = parts.groupby("kind")["size"].sum().to_dict()
        assert set(by_kind) <= set(MemoryKind)
        close = {"rel": 0.05, "abs": 0.01 * peak.estimate * 2**20}
        highest = max(planned[work.scope], key=lambda section: section.peak)
        assert by_kind == pytest.approx(highest.bytes_by_kind, **close)
        (again, *_) = memory_plan.memory_rows(work, "cpu", plan)
        assert again.estimate == pytest.approx(peak.estimate, rel=0.05)
    if case.mode == "training":
        lines = parts[parts["kind"] == MemoryKind.SAVED]["line"]
        assert len(lines) and all(re.fullmatch(r"[^/]*:\d+", line) for line in lines)


@pytest.mark.slow
def test_the_memory_of_a_compiled_model_is_that_of_the_process(monkeypatch):
    # The backend makes no difference, because no kernel is counted.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    rows = {
        row.metric: row
        for row in timed_alone(_case("inference", optimization="compile").measure(PARAMS, {}))
    }
    assert rows["peak_memory"].status is Status.UNSUPPORTED
    assert "see resident_memory" in rows["peak_memory"].message and "resident_memory" in rows


def test_what_a_gpus_allocator_holds_beyond_the_tensors_is_its_own_part(monkeypatch):
    """The allocator is simulated, and the tensors are on the CPU."""
    work = _case().step()
    live = breakdown(work).peak

    def measured(call, **_):
        call()
        peak = exact("peak_memory", (live + 512) / 2**20, method="cuda_allocator", details={})
        return [peak, exact("reserved_memory", 9.0)]

    monkeypatch.setattr(memory_plan, "measure_memory", measured)
    peak, _ = memory_plan.breakdown_rows(work, "cuda:0", _case().plan())
    assert [MemoryKind.UNATTRIBUTED, "", "", "", 512] in peak.details["parts"]
    assert sum(part[-1] for part in peak.details["parts"]) == peak.estimate * 2**20
