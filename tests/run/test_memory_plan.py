"""Memory plans agree with the measured memory of each kind, and a low stack predicts a high one."""

import contextlib
import dataclasses
import functools
import re
import resource
import subprocess
import sys

import pytest
import torch

from nanolib.experiments import ALL
from nanolib.experiments.model import cases as model
from nanolib.experiments.model import look
from nanolib.experiments.model.case import GenerationCase, LossCase, ModelCase
from nanolib.measurement import MemoryKind, Status, exact
from nanolib.models.optimize import OPTIMIZATIONS, applies, is_compiled
from nanolib.params import read_yaml
from nanolib.paths import checkout
from nanolib.run import memory_plan, sweep
from tests.experiments.own import LLAMA, TINY
from tests.measuring import breakdown, timed_alone

MODES = ("inference", "training", "generation")


@contextlib.contextmanager
def _whole(monkeypatch):
    """Plan the whole stack of blocks, without extrapolation."""
    with monkeypatch.context() as patch:
        patch.setattr(memory_plan, "_PLANS", {})
        patch.setattr(look, "_LOOKS", {})
        patch.setattr(memory_plan, "_LOW", 10**6)
        yield


SMALL = {"num_layers": 6, "d_model": 64, "num_heads": 4, "vocab_size": 512}


PARAMS = model.Params(budget_s=0.01, rel_ci=0.5, device="cpu")


def _case(
    mode="training", optimization="eager", preset="decoder_tiny", overrides=TINY, shape=(48, 8)
):
    kind, more = (GenerationCase, {"new_tokens": 3}) if mode == "generation" else (ModelCase, {})
    shape = ("own" if ":" in preset else "dense", *shape, "float32")
    return kind("cpu", preset, preset, overrides, *shape, mode, optimization, **more)


# These optimizations have the plan of the eager model.
AS_EAGER = {name for name in OPTIMIZATIONS if is_compiled(name)} | {"cuda_graph"}


# With two blocks the peak is at the output, with many it is at the last gradients.
HEAVY = {"num_layers": 11, "d_model": 256, "num_heads": 4, "vocab_size": 8192}


@pytest.mark.parametrize(
    ("optimization", "overrides", "shape"),
    [
        *((name, SMALL, (48, 8)) for name in sorted(set(OPTIMIZATIONS) - AS_EAGER)),
        ("eager", HEAVY, (8, 1)),
    ],
)
def test_a_high_stack_is_planned_from_two_low_ones(monkeypatch, optimization, overrides, shape):
    for mode in MODES:
        if not applies(optimization, mode, "float32"):
            continue
        case = _case(mode, optimization, overrides=overrides, shape=shape)
        quick = case.plan()
        with _whole(monkeypatch):
            assert quick.peaks and quick == case.plan(), mode


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


@pytest.mark.slow
def test_a_case_that_will_not_fit_is_never_started(store, monkeypatch):
    case = _case()
    need = case.plan().most  # the plan is cached, so no model is needed later
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: need - 1)
    monkeypatch.setattr(look, "create_model", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(model, "cases", lambda _: [case])
    rows = sweep.measure(model, PARAMS, store=store, progress=False).measurements()
    (ending,) = rows[rows.metric == "case_duration"].to_dict("records")
    assert ending["status"] == Status.OOM_PREDICTED
    assert "MiB are free" in ending["message"]


OOM = """
import resource, sys
from nanolib.experiments.attention import cases as attention
from nanolib.run import sweep
from nanolib.store import Store

params = attention.Params(
    device="cpu", budget_s=0.05, seq_lens=[4096, 64], attention_types=[{"kind": "dense", "backend": "math"}], num_heads=8,
    backward=False,
)
cases = [c for c in attention.cases(params) if isinstance(c, attention.AttentionCase)]
attention.cases = lambda _: cases
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, resource.RLIM_INFINITY))
with Store(sys.argv[1]) as store:
    rows = sweep.measure(attention, params, store=store, progress=False).measurements()
    ends = rows[rows.metric == "case_duration"]
    print(list(zip(ends["factor.seq_len"], ends.status, ends.message)))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux",
    reason="needs Linux's address limit",
)
def test_running_out_of_memory_is_a_row_and_the_next_case_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OOM, str(tmp_path / "results.sqlite")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "(4096, 'oom'" in done.stdout
    assert "(64, 'ok', '')" in done.stdout


def _memory(case):
    rows = list(timed_alone(case.measure(PARAMS, {})))
    peaks = {row.scope: row for row in rows if row.metric == "peak_memory"}
    return peaks, [row for row in rows if row.metric == "memory_part"]


@pytest.mark.parametrize(
    "case",
    [
        *map(_case, MODES),
        _case(optimization="autocast_bfloat16_checkpoint"),
        _case(preset="hf:LlamaForCausalLM", overrides=LLAMA),
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
        assert sum(row.predicted for row in own) == pytest.approx(peak.predicted)
        assert peak.estimate == pytest.approx(peak.predicted, rel=0.05)
        assert max(peak.details["phases"].values()) == peak.estimate * 2**20
    if case.mode == "training":
        details = peaks["training_step"].details
        assert set(details["phases"]) == {"forward", "backward", "optimizer_step"}
        lines = [part[3] for part in details["parts"] if part[0] == MemoryKind.SAVED]
        assert lines and all(re.fullmatch(r"[^/]*:\d+", line) for line in lines)


def test_a_tokens_peak_is_its_plan_wherever_decoding_stood():
    """Sparse attention in float32 copies the cache unless it is full."""
    options = {"pattern": "window", "window": 8, "block_size": 8}
    case = _case("generation", overrides=TINY | {"attention_options": options})
    case = dataclasses.replace(case, attention_type="sparse")
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
    # The backend makes no difference, because no kernel is counted.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    peaks, parts = _memory(_case("inference", "compile"))
    assert peaks["inference"].status is Status.UNSUPPORTED
    (part,) = parts
    assert part.scope == f"inference: {MemoryKind.UNATTRIBUTED}"
    assert "the parts are not known" in part.message


def test_what_a_gpus_allocator_holds_beyond_the_tensors_is_a_part_of_its_own(monkeypatch):
    """The allocator is simulated, and the tensors are on the CPU."""
    work = next(_case().at_depth(0).workloads())
    work.call()
    live = breakdown(work, torch.nn.Module()).peak

    def measured(call, **_):
        call()
        peak = exact("peak_memory", (live + 512) / 2**20, method="cuda_allocator", details={})
        return [peak, exact("reserved_memory", 9.0)]

    monkeypatch.setattr(memory_plan, "measure_memory", measured)
    peak, _, *parts = memory_plan.breakdown_rows(
        work, torch.nn.Module(), "cuda:0", _case().plan(), None
    )
    held = {row.scope.partition(": ")[2]: row for row in parts}
    assert held[MemoryKind.UNATTRIBUTED].estimate == 512 / 2**20
    assert held[MemoryKind.UNATTRIBUTED].predicted is None
    assert sum(row.estimate for row in parts) == peak.estimate
