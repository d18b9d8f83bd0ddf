"""Instruments on a clock that moves only where the work says so: every figure is known to the nanosecond."""

import torch
from torch import nn

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


def test_what_looking_takes_is_in_no_modules_time(clock, monkeypatch):
    model = _Model(clock)
    real = torch.aminmax

    def slow(x):
        clock[0] += 5_000_000
        return real(x)

    monkeypatch.setattr(torch, "aminmax", slow)
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
