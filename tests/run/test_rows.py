"""Rows of who holds a peak: they add up to it, to the byte, and where nobody knows they say so."""

import dataclasses
import functools

import pytest
import torch

from nanolib.experiments.model import cases as model
from nanolib.experiments.model.case import GenerationCase, ModelCase
from nanolib.measurement import MemoryKind, Status
from nanolib.meters import memory
from nanolib.run import memory_plan
from tests.experiments.own import LLAMA, TINY
from tests.measuring import timed_alone

PARAMS = model.Params(budget_s=0.01, rel_ci=0.5, device="cpu")


def _case(
    preset="decoder_tiny",
    overrides=TINY,
    mode="training",
    optimization="eager",
    kind=ModelCase,
    **more,
):
    shape = ("dense" if preset == "decoder_tiny" else "own", 48, 8, "float32")
    return kind("cpu", preset, preset, overrides, *shape, mode, optimization, **more)


def _memory(case):
    found = [
        row
        for row in timed_alone(case.measure(PARAMS, {}))
        if row.metric in ("peak_memory", "memory_part")
    ]
    return {row.scope: row for row in found if row.metric == "peak_memory"}, [
        r for r in found if r.metric != "peak_memory"
    ]


@pytest.mark.parametrize(
    "case",
    [
        _case(),
        _case(mode="inference"),
        _case(optimization="checkpoint"),
        _case(optimization="autocast_bfloat16"),
        _case(mode="generation", kind=GenerationCase, new_tokens=2),
        _case("hf:LlamaForCausalLM", LLAMA),
    ],
    ids=lambda case: f"{case.preset} {case.mode} {case.optimization}",
)
def test_parts_add_up_to_the_peak_and_stand_beside_their_plan(case):
    peaks, parts = _memory(case)
    for scope, peak in peaks.items():
        own = [row for row in parts if row.scope.startswith(f"{scope}: ")]
        assert {row.scope.partition(": ")[2] for row in own} <= set(MemoryKind)
        assert sum(row.estimate for row in own) == peak.estimate
        assert sum(part[-1] for part in peak.details["parts"]) == peak.estimate * 2**20
        assert (
            sum(row.predicted for row in own)
            == pytest.approx(peak.predicted)
            == pytest.approx(peak.estimate, rel=0.05)
        )
        assert max(peak.details["phases"].values()) == peak.estimate * 2**20
    if case.mode == "training":
        assert set(peaks["training_step"].details["phases"]) == {
            "forward",
            "backward",
            "optimizer_step",
        }
        lines = {
            part[3]
            for part in peaks["training_step"].details["parts"]
            if part[0] == MemoryKind.SAVED
        }
        assert lines and all(
            line.rpartition(":")[2].isdigit() and "/" not in line for line in lines
        )


def test_a_tokens_peak_is_its_plan_wherever_decoding_stood():
    """Sparse attention in float32 copies the cache unless it is full."""
    options = {"pattern": "window", "window": 8, "block_size": 8}
    overrides = TINY | {"attention_options": options}
    case = dataclasses.replace(
        _case(overrides=overrides, mode="generation", kind=GenerationCase, new_tokens=3),
        attention_type="sparse",
    )
    step = case.step(case.build(0), case.no_ids(), 1e-3)
    prefill, decode = step.workloads()
    prefill.call()
    for rows in (
        functools.partial(memory_plan.breakdown_rows, decode, step.model, "cpu", case.plan(), None),
        functools.partial(memory_plan.memory_rows, decode, "cpu", case.plan()),
    ):
        for _ in range(3):
            peak, *_ = rows()
            assert peak.estimate == peak.predicted
            decode.call()


@pytest.mark.slow
def test_of_a_compiled_model_the_whole_is_told_and_why_no_parts_are(monkeypatch):
    # no kernel's are, whoever makes it
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    peaks, parts = _memory(_case(mode="inference", optimization="compile"))
    assert peaks["inference"].status is Status.UNSUPPORTED
    (part,) = parts
    assert (
        part.scope == f"inference: {MemoryKind.UNATTRIBUTED}"
        and "its parts are not known" in part.message
    )
    assert part.estimate is None or part.estimate >= 0


def test_what_a_gpus_allocator_holds_beyond_the_tensors_is_a_part_of_its_own(monkeypatch):
    """Simulated: the tensors lie on the CPU, the allocator's figures are told."""
    work = next(iter(_case().at_depth(0)[1]))
    work.call()
    live = sum(_parts(work).values())

    def measured(call, **said):
        call()
        peak = memory.exact(
            "peak_memory",
            (live + 512) / 2**20,
            scope=said["scope"],
            method="cuda_allocator",
            details={},
        )
        return [peak, memory.exact("reserved_memory", 9.0, scope=said["scope"])]

    monkeypatch.setattr(memory_plan, "measure_memory", measured)
    peak, _, *parts = memory_plan.breakdown_rows(
        work, torch.nn.Module(), "cuda:0", dataclasses.replace(_case()).plan(), None
    )
    held = {row.scope.partition(": ")[2]: row for row in parts}
    assert (
        held[MemoryKind.UNATTRIBUTED].estimate == 512 / 2**20
        and held[MemoryKind.UNATTRIBUTED].predicted is None
    )
    assert sum(row.estimate for row in parts) == peak.estimate


def _parts(work):
    counter = memory_plan.followed(work, torch.nn.Module())
    return max(
        (held.by_kind for held in counter.breakdowns().values()),
        key=lambda kinds: sum(kinds.values()),
    )
