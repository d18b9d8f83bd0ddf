"""Instruments on a clock that moves only where the work says so: every figure is known to the nanosecond."""

import torch
from torch import nn

from nanolib.meters.layers import profiler as layers
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.profiling import ProfilingConfig


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
        self.clock, self.first, self.mlp = (
            clock,
            _Work(clock, ns),
            nn.Sequential(_Work(clock, 2 * ns)),
        )

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


def test_minimal_has_each_block_and_each_neighbour_to_the_nanosecond(clock):
    model = _Model(clock)
    with LayerProfiler(model) as profiler:
        model(X)
        model.decode(X)  # which calls forward: one call of the model
    found = {row.name: row for row in profiler.results()}
    assert {name: row.calls_ms for name, row in found.items()} == {
        "": [0.283, 0.283],
        "embedding": [0.07] * 2,
        "head": [0.03] * 2,
        "blocks.0": [0.031] * 2,
        "blocks.1": [0.061] * 2,
        "blocks.2": [0.091] * 2,
    }
    assert found[""].total_ms == 0.566 and profiler.rows == 12
    assert {row.kind for row in found.values()} == {"model", "block", "_Work"}


def test_every_kth_call_has_its_modules_in_every_nth_block(clock):
    model = _Model(clock)
    config = ProfilingConfig.custom(every_kth_token=2, every_nth_layer=2, capture_activations=False)
    with LayerProfiler(model, config) as profiler:
        for _ in range(3):
            model(X)
    found = {row.name: (row.calls_ms, row.inside) for row in profiler.results()}
    assert found["blocks.0.first"] == ([0.01] * 2, "blocks.0") and found["blocks.2.mlp"] == (
        [0.06] * 2,
        "blocks.2",
    )
    assert found["blocks.2.mlp.0"] == ([0.06] * 2, "blocks.2.mlp") and found["blocks.1"] == (
        [0.061] * 3,
        "",
    )
    assert "blocks.1.first" not in found
    assert profiler.rows == 3 * 6 + 2 * 6


def test_what_looking_takes_is_in_no_modules_time(clock, monkeypatch):
    model = _Model(clock)
    real = layers.Activations.take

    def slow(self, at, out):
        clock[0] += 5_000_000
        real(self, at, out)

    monkeypatch.setattr(layers.Activations, "take", slow)
    with LayerProfiler(model, ProfilingConfig.custom(every_kth_token=1)) as profiler:
        model(X)
    found = {row.name: row.calls_ms for row in profiler.results()}
    assert found[""] == [0.283] and found["blocks.1"] == [0.061] and found["blocks.1.mlp"] == [0.04]


def test_a_deep_pass_has_its_layers_and_no_calls(clock):
    model = _Model(clock)
    config = ProfilingConfig.custom(every_kth_token=2, deep_profiling=True)

    def forward(x):  # an operation per block, so that the pass has some; the first has one more
        clock[0] += 1000
        x = model.blocks[0].first(
            torch.neg(x) if clock[0] > 100_000 else torch.add(torch.neg(x), 1)
        )
        return model.blocks[0].mlp(x)

    model.blocks[0].__class__ = type("Negating", (_Block,), {"forward": lambda self, x: forward(x)})
    model.__class__ = type(
        "Scaling", (_Model,), {"forward": lambda self, x: _Model.forward(self, 2 * x)}
    )
    with LayerProfiler(model, config) as profiler:
        for _ in range(3):
            model(X)
    times = {row.name: row.calls_ms for row in profiler.results()}
    assert times["blocks.0"] == [0.031] and times[""] == [
        0.283
    ]  # the call between the two deep ones
    deep = {layer.name: layer for layer in profiler.deep_results()}
    assert list(deep) == ["embedding", "head", "blocks.0", "blocks.1", "blocks.2"]
    assert deep["blocks.0"].passes_ms == [0.031, 0.031] and deep["head"].passes_ms == [0.03, 0.03]
    assert deep["blocks.0"].operations == {"other": [0.0, 0.0], "residual": [0.0, 0.0]}
    assert not deep["embedding"].operations  # what the model does by itself is no layer's
    assert deep["blocks.0"].between_ms == [0.031, 0.031]


# what looking costs


def test_the_modes_are_what_their_names_say():
    minimal, standard, deep = (
        ProfilingConfig.named(mode) for mode in ("minimal", "standard", "deep")
    )
    flags = ("modules", "capture_activations", "deep_profiling", "looks")
    assert [[getattr(config, flag) for flag in flags] for config in (minimal, standard, deep)] == [
        [False, False, False, False],
        [True, True, False, True],
        [True, True, True, True],
    ]
    assert (minimal.every_kth_token, minimal.every_nth_layer, minimal.near_zero) == (16, 1, 0.01)
    assert (
        minimal.power_sample_interval_ms,
        minimal.preallocate_metrics,
        minimal.batch_db_commits,
    ) == (50.0, 64, True)
    assert ProfilingConfig(modules=True).looks and ProfilingConfig(capture_activations=True).looks
