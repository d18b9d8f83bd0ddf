"""The profiler on a clock that only the work moves, its overhead, and the trace of torch's own."""

import json
import platform
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

from nanolib.meters import layers, operations, overhead
from nanolib.meters.layers import LayerProfiler
from nanolib.meters.operations import write_trace
from nanolib.meters.overhead import measure_overhead
from nanolib.meters.recording import ProfilingConfig

from .test_layers import values_of


class _Work(nn.Module):
    def __init__(self, clock, ns):
        super().__init__()
        self.clock, self.ns = clock, ns

    def forward(self, x):
        self.clock[0] += self.ns
        return x


class _Block(_Work):
    def __init__(self, clock, ns):
        super().__init__(clock, 1000)
        self.first, self.mlp = _Work(clock, ns), nn.Sequential(_Work(clock, 2 * ns))

    def forward(self, x):
        return self.mlp(self.first(super().forward(x)))


class _Negating(_Block):
    def forward(self, x):
        return super().forward(torch.neg(x) + 1)


class _Head(_Work):
    """Returns no tensor, of which nothing is summarized."""

    def forward(self, x):
        return (super().forward(x),)


class _Model(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.embedding, self.head = _Work(clock, 70_000), _Head(clock, 30_000)
        self.blocks = nn.ModuleList(
            [_Negating(clock, 10_000), _Block(clock, 20_000), _Block(clock, 30_000)]
        )

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


@pytest.fixture
def look_slowly(clock, monkeypatch):
    """Let each look at an output take 20 ms."""
    real = layers.output_statistics

    def slow(*given):
        clock[0] += 20_000_000
        return real(*given)

    monkeypatch.setattr(layers, "output_statistics", slow)


def test_deep_passes_are_apart_from_calls_and_each_layer_has_its_operations(clock, look_slowly):
    """Every third of 30 calls looks; the next eight times operations, the third only modules."""
    model = _Model(clock)
    with LayerProfiler(model, ProfilingConfig.deep(every_kth_token=1)) as profiler:
        for _ in range(30):
            model(X)
    found = {row.name: row for row in profiler.results()}
    block = found["blocks.0"]
    assert block.calls_ms == [0.031] * 12 and found[""].calls_ms == [0.283] * 12
    assert found["blocks.0.first"].calls_ms == [0.01] * 12
    assert len(values_of(profiler, "blocks.0")["sd"]) == 10
    deep = {name: row.passes for name, row in found.items() if row.passes}
    assert deep == dict.fromkeys(["embedding", "head", "blocks.0", "blocks.1", "blocks.2"], 8)
    assert {*block.operations} == {"other", "residual"}
    assert not found["blocks.1"].operations


class _Watched(nn.Module):
    """Takes 10 ms, 11 if its block is watched, 20 more if it is looked at, and 1 more per call."""

    def __init__(self, clock, drift_ns):
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
    modes = {"minimal": ProfilingConfig(), "standard": ProfilingConfig.standard()}

    def measured(drift_ns=0, share=0.5):
        monkeypatch.setitem(overhead._DETAIL_SHARES, "standard", share)
        model = _Watched(clock, drift_ns)
        rows = measure_overhead(model, lambda: model(X), modes, scope="prefill", budget_s=0.0)
        return {row.scope: row for row in rows}

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
    # every other detailed call takes 31 ms
    assert standard.estimate == pytest.approx((11 + 21) / 2 / 10 - 1 + 0.02)
    wall = [standard.low, standard.estimate, standard.high]
    assert standard.details["cpu"] == pytest.approx(wall)
    names = ("detailed_ms", "plain_ms", "detailed_every")
    assert [standard.details[name] for name in names] == pytest.approx((21, 10, 2))


@pytest.mark.parametrize(("share", "every"), [(0.101, 10), (5.0, 2), (1e-3, 128)])
def test_detailed_calls_are_as_rare_as_their_overhead_asks(cost, share, every):
    standard = cost(share=share)["prefill standard"]
    assert standard.details["detailed_every"] == every  # a detailed call takes 10 ms more
    assert standard.estimate == pytest.approx(0.1 + 1 / every + 0.02)


def test_a_machine_that_grows_slower_is_no_cost(cost):
    """In all it grows slower by a tenth."""
    minimal = cost(drift_ns=10_000)["prefill minimal"]
    assert minimal.estimate == pytest.approx(0.1 + 0.02, abs=0.01)


def test_a_trace_tells_each_operation_with_its_shapes_and_names_no_machine_or_folder(tmp_path):
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    calls = []

    def call():
        calls.append(1)
        return torch.softmax(a @ b, dim=-1)

    write_trace(call, tmp_path / "case.json")
    text = (tmp_path / "case.json").read_text()
    events = json.loads(text)["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == len(calls) - 1  # the first call is not traced
    assert products[0]["args"]["Input Dims"][:2] == [[8, 16], [16, 4]]
    assert any(event.get("name") == "[memory]" for event in events)
    assert not any(word in text for word in ("host_name", str(tmp_path), f'"{platform.node()}"'))


def test_a_gpus_kernels_are_traced(tmp_path, monkeypatch):
    def profile(activities, **options):
        raise LookupError(*activities)

    monkeypatch.setattr(operations, "profile", profile)
    with pytest.raises(LookupError) as asked:
        write_trace(X.neg, tmp_path / "case.json", "cuda:1")
    assert asked.value.args == (ProfilerActivity.CPU, ProfilerActivity.CUDA)


def _event(name, parent, cpu_us=0.0, gpu_us=0.0):
    times = {"cpu_time_total": cpu_us, "device_time_total": gpu_us}
    return SimpleNamespace(name=name, cpu_parent=parent, **times)


@pytest.mark.parametrize(
    ("on_gpu", "ns"), [(False, (2_000, 1_500, 4_000)), (True, (7_000, 250, 6_000))]
)
def test_an_operation_has_the_time_of_its_outermost_module_and_its_inner_ones_none(on_gpu, ns):
    block = _event(f"{operations.RANGE}blocks.0", None)
    query = _event(f"{operations.RANGE}blocks.0.q", block)
    linear = _event("aten::linear", query, 2.0, 7.0)
    events = [block, query, linear, _event("aten::mm", linear, 1.0, 1.0), _event("aten::mm", None)]
    events.append(_event("aten::add", block, 1.5, 0.25))
    events.append(_event("aten::scaled_dot_product_attention", query, 4.0, 6.0))
    found = operations.operations_of(events, {"blocks.0": "", "blocks.0.q": "q_proj"}, on_gpu)
    names = ("q_proj", "residual", "attention_fused")
    assert found == {("blocks.0", name): time for name, time in zip(names, ns, strict=True)}
