import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from nanolib.meters.layers import overhead
from nanolib.meters.layers.overhead import AGAIN, PLAIN, measure_overhead
from nanolib.meters.layers.profiling import ProfilingConfig

# Seconds of a call by kind, wall and processor, and the rows it makes.
_BARE, _WATCHED, _LOOKED = (0.010, 0.008, 0), (0.011, 0.009, 3), (0.030, 0.020, 50)
_HANDING = np.array([0.002, 0.001])  # of a watched call


@pytest.fixture
def clockwork(monkeypatch):
    """Calls that take what is said above, threads that take a hundredth of a second per reading, a thousandth per row."""
    order = []

    def timed(model, call, kind, calls, sink, synchronize):
        order.append(kind)
        wall, cpu, rows = _BARE if isinstance(kind, str) else _LOOKED if kind.looks else _WATCHED
        return np.array([wall, cpu]), float(rows)

    doubles = {
        "_timed": timed,
        "_reading_s": lambda: 0.01,
        "_writing_s": lambda sink: 0.001,
        "_handing_s": lambda model, call, kind, calls, sink: (
            _HANDING * (kind == ProfilingConfig.minimal())
        ),
    }
    for name, double in doubles.items():
        monkeypatch.setattr(overhead, name, double)
    return order


def _measured(**settings):
    modes = {
        "minimal": ProfilingConfig.minimal(),
        "deep": replace(ProfilingConfig.deep(), every_kth_token=5, power_sample_interval_ms=100.0),
    }
    return {
        found.mode: found
        for found in measure_overhead(torch.nn.Linear(1, 1), lambda: None, modes, **settings)
    }


def test_a_mode_costs_the_mean_of_its_calls_and_its_threads_in_full(clockwork):
    found = _measured(budget_s=0.0)
    assert list(found) == ["again", "minimal", "deep"]
    assert found["again"].wall == pytest.approx((0, 0, 0)) and found["again"].threads == 0
    assert (found["again"].pass_ms, found["again"].rows) == (pytest.approx((0, 10)), 0)
    minimal, deep = found["minimal"], found["deep"]
    assert minimal.threads == pytest.approx(
        0.01 / 0.05 + 3 * 0.001 / 0.010
    )  # readings, and rows per call
    assert minimal.wall.estimate == pytest.approx(0.013 / 0.010 - 1 + minimal.threads)
    assert minimal.cpu.estimate == pytest.approx(0.010 / 0.008 - 1 + minimal.threads)
    assert deep.rows == pytest.approx((4 * 3 + 50) / 5)
    assert deep.threads == pytest.approx(0.01 / 0.1 + deep.rows * 0.001 / 0.010)
    assert deep.wall.estimate == pytest.approx((4 * 0.011 + 0.030) / 5 / 0.010 - 1 + deep.threads)
    assert deep.pass_ms == pytest.approx((30, 10)) and minimal.pass_ms == pytest.approx((13, 10))


def test_every_round_runs_all_kinds_there_and_back_between_bare_calls_and_six_rounds_are_the_least(
    clockwork,
):
    found = _measured(budget_s=0.0, rel_ci=0.0)
    kinds = 4  # bare again, watched as either mode does, looked at
    rounds = clockwork[
        kinds + 2 :
    ]  # after each kind's first call, and a bare one's, and one for how long it takes
    each = 2 * (2 * kinds) + 1
    assert len(rounds) == 6 * each and {f.rounds for f in found.values()} == {6}
    for at in range(0, len(rounds), each):
        of_round = rounds[at : at + each]
        assert set(of_round[::2]) == {PLAIN}
        there, back = of_round[1::2][:kinds], of_round[1::2][kinds:]
        assert there == back[::-1] and len(set(there)) == kinds and AGAIN in there


def test_a_machine_that_grows_slower_is_no_cost(monkeypatch, clockwork):
    ordinary, drift = overhead._timed, iter(range(10**6))

    def slower(*args):
        spent, rows = ordinary(*args)
        return spent * (1 + 0.01 * next(drift)), rows

    monkeypatch.setattr(overhead, "_timed", slower)
    monkeypatch.setattr(overhead, "_handing_s", lambda *_: np.zeros(2))
    minimal = _measured(budget_s=0.0)["minimal"]
    assert minimal.wall.estimate - minimal.threads == pytest.approx(0.1, abs=2e-3)


def test_a_row_says_what_it_rests_on(clockwork):
    row = _measured(budget_s=0.0)["deep"].to_measurement("prefill")
    assert (row.metric, row.scope, row.n, row.confidence, row.method) == (
        "overhead",
        "prefill deep",
        6,
        0.95,
        "interleaved_pairs",
    )
    assert row.low <= row.estimate <= row.high and math.isclose(row.details["pass_ms"], 30)
    assert row.details["plain_ms"] == pytest.approx(10) and row.details[
        "rows_per_call"
    ] == pytest.approx(12.4)


def test_a_models_own_calls_are_looked_at_in_each_mode():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    modes = {
        "minimal": ProfilingConfig.minimal(),
        "deep": ProfilingConfig.custom(deep_profiling=True, every_kth_token=2),
    }
    found = {
        one.mode: one
        for one in measure_overhead(model, lambda: model(torch.ones(2, 4)), modes, budget_s=0.0)
    }
    assert list(found) == ["again", "minimal", "deep"] and found["again"].rows == 0
    assert found["deep"].rows > found["minimal"].rows > 0 and found["deep"].pass_ms[0] > 0
    assert all(
        one.wall.low <= one.wall.estimate <= one.wall.high and one.rounds >= 6
        for one in found.values()
    )
