import pytest
import torch
from torch import nn

from nanolib.meters.layers import overhead
from nanolib.meters.layers.overhead import measure_overhead
from nanolib.meters.layers.recording import ProfilingConfig


class _Work(nn.Module):
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
def cost(clock, monkeypatch):
    monkeypatch.setattr(overhead, "_reading_ms", lambda: 1.0)
    real = torch.aminmax

    def close(x):
        clock[0] += 19_000_000
        return real(x)

    monkeypatch.setattr(torch, "aminmax", close)

    def measured(drift_ns=0):
        model = _Work(clock, drift_ns)
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
