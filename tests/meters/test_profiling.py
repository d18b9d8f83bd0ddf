"""The profiler on a clock that moves only where the work says so, its overhead, and the trace of torch's own."""

import json
import sys

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

from nanolib.meters.layers import operations, overhead
from nanolib.meters.layers import profiler as profiler_module
from nanolib.meters.layers.operations import write_trace
from nanolib.meters.layers.overhead import measure_overhead
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.recording import ProfilingConfig


class _Work(nn.Module):
    def __init__(self, clock, ns):
        super().__init__()
        self.clock, self.ns = clock, ns

    def forward(self, x):
        self.clock[0] += self.ns
        return x


class _Block(nn.Module):
    def __init__(self, clock, ns):
        super().__init__()
        self.clock, self.first = clock, _Work(clock, ns)
        self.mlp = nn.Sequential(_Work(clock, 2 * ns))

    def forward(self, x):
        self.clock[0] += 1000
        return self.mlp(self.first(x))


class _Model(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.embedding, self.head = _Work(clock, 70_000), _Work(clock, 30_000)
        self.blocks = nn.ModuleList(_Block(clock, ns) for ns in (10_000, 20_000, 30_000))

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def decode(self, x):
        return self(x)


X = torch.ones(2, 3)


def test_minimal_has_each_block_and_each_neighbor_to_the_nanosecond(clock):
    model = _Model(clock)
    with LayerProfiler(model) as profiler:
        model(X)
        model.decode(X)  # which calls forward: one call of the model
    assert {row.name: row.calls_ms for row in profiler.results()} == {
        "": [0.283, 0.283],
        "embedding": [0.07] * 2,
        "head": [0.03] * 2,
        "blocks.0": [0.031] * 2,
        "blocks.1": [0.061] * 2,
        "blocks.2": [0.091] * 2,
    }
    assert {row.kind for row in profiler.results()} == {"model", "block", "_Work"}


@pytest.fixture
def look_slowly(clock, monkeypatch):
    """Let each look at an output take 19 ms."""
    real = profiler_module.sample_of

    def slow(x):
        clock[0] += 19_000_000
        return real(x)

    monkeypatch.setattr(profiler_module, "sample_of", slow)


def test_what_looking_takes_is_in_no_modules_time(clock, look_slowly):
    model = _Model(clock)
    with LayerProfiler(model, ProfilingConfig.custom(every_kth_token=1)) as profiler:
        model(X)
    found = {row.name: row.calls_ms for row in profiler.results()}
    assert found[""] == [0.283] and found["blocks.1"] == [0.061] and found["blocks.1.mlp"] == [0.04]


def test_deep_passes_are_apart_from_calls_and_each_layer_has_its_operations(clock):
    model = _Model(clock)
    outer = type(model.blocks[0]).forward

    def forward(self, x):
        return outer(self, torch.neg(x) + 1)

    model.blocks[0].__class__ = type("Negating", (_Block,), {"forward": forward})
    with LayerProfiler(model, ProfilingConfig.deep(every_kth_token=2)) as profiler:
        for _ in range(7):
            model(X)
    found = {row.name: row for row in profiler.results()}
    assert found["blocks.0"].calls_ms == [0.031] * 5 and found[""].calls_ms == [0.283] * 5
    deep = [name for name, row in found.items() if row.passes]
    assert deep == ["embedding", "head", "blocks.0", "blocks.1", "blocks.2"]
    assert [one.ms for one in found["blocks.0"].passes] == [0.031, 0.031]
    assert {*found["blocks.0"].passes[0].operations} == {"other", "residual"}
    assert not found["blocks.1"].passes[0].operations


def test_at_most_eight_calls_are_recorded_by_torchs_profiler(clock):
    with LayerProfiler(_Model(clock), ProfilingConfig.deep(every_kth_token=1)) as profiler:
        for _ in range(18):
            profiler.model(X)
    block = profiler.results()[3]
    assert (len(block.passes), len(block.calls_ms), len(block.values["sd"])) == (8, 10, 10)


class _Watched(nn.Module):
    """Takes 10 ms, 11 where its block is watched, 30 where it is looked at closely, and one more per call."""

    def __init__(self, clock, drift_ns=0):
        super().__init__()
        self.blocks, self.weight = nn.ModuleList([nn.Identity()]), nn.Parameter(torch.ones(1))
        self.clock, self.ns, self.drift_ns = clock, 10_000_000, drift_ns

    def forward(self, x):
        is_watched = "forward" in vars(self.blocks[0])
        self.clock[0] += self.ns + 1_000_000 * is_watched
        self.ns += self.drift_ns
        return self.blocks[0](x)


@pytest.fixture
def cost(clock, look_slowly, monkeypatch):
    monkeypatch.setattr(overhead, "_reading_ms", lambda: 1.0)

    def measured(drift_ns=0):
        model = _Watched(clock, drift_ns)
        modes = {
            "minimal": ProfilingConfig(),
            "standard": ProfilingConfig.standard(every_kth_token=5),
        }
        found = measure_overhead(
            model, lambda: model(torch.ones(2)), modes, scope="prefill", budget_s=0.0
        )
        return {row.scope: row for row in found}

    return measured


def test_a_mode_costs_the_mean_of_its_calls_and_its_readings_of_power(cost):
    found = cost()
    assert list(found) == ["prefill again", "prefill minimal", "prefill standard"]
    again, minimal, standard = found.values()
    assert {(row.metric, row.n) for row in found.values()} == {("overhead", 6)}
    assert (again.low, again.estimate, again.high) == pytest.approx((0, 0, 0))
    assert again.details["threads"] == 0
    assert minimal.details["threads"] == pytest.approx(0.001 / 0.05)
    assert minimal.estimate == pytest.approx(0.1 + 0.02)
    assert standard.estimate == pytest.approx((4 * 11 + 30) / 5 / 10 - 1 + 0.02)
    assert standard.details["cpu"] == pytest.approx(
        [standard.low, standard.estimate, standard.high]
    )
    assert (standard.details["pass_ms"], standard.details["plain_ms"]) == pytest.approx((30, 10))


def test_a_machine_that_grows_slower_is_no_cost(cost):
    minimal = cost(drift_ns=20_000)["prefill minimal"]
    assert minimal.estimate == pytest.approx(0.1 + 0.02, abs=0.02)


def test_a_models_own_calls_are_looked_at_in_each_mode():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    modes = {"deep": ProfilingConfig.deep(every_kth_token=2)}
    again, deep = measure_overhead(model, lambda: model(torch.ones(2, 4)), modes, budget_s=0.0)
    assert again.details["pass_ms"] == 0 < deep.details["pass_ms"]


def test_a_trace_tells_each_operation_with_its_shapes_and_memory(tmp_path):
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    calls = []

    def call():
        calls.append(1)
        return torch.softmax(a @ b, dim=-1)

    write_trace(call, tmp_path / "case.json")
    events = json.loads((tmp_path / "case.json").read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == len(calls) - 1  # the first call is not traced
    assert products[0]["args"]["Input Dims"][:2] == [[8, 16], [16, 4]]
    assert any(event.get("name") == "[memory]" for event in events)


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
def test_a_gpus_kernels_are_traced_where_there_is_one(tmp_path, monkeypatch, device):
    asked = []

    def profile(activities, **options):
        asked.extend(activities)
        return torch.profiler.profile(activities=[ProfilerActivity.CPU], **options)

    monkeypatch.setattr(operations, "profile", profile)
    write_trace(lambda: torch.ones(2) + 1, tmp_path / "case.json", device)
    assert asked == [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * device.startswith("cuda")]


@pytest.mark.parametrize("config", [ProfilingConfig(), ProfilingConfig.deep(every_kth_token=100)])
def test_a_call_without_details_enters_one_function_per_timed_module(clock, config):
    model, entered = _Model(clock), []

    def noted(frame, event, _):
        if event == "call" and "nanolib/meters/layers" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    with LayerProfiler(model, config):
        model(X)  # the first call has details
        sys.setprofile(noted)
        try:
            model(X)
        finally:
            sys.setprofile(None)
    # two neighbors of the blocks, three blocks, and the model
    assert sorted(entered) == [*["timed"] * 5, "watched"]
