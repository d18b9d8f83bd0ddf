"""Blocks in turns: what happens to a whole round is no part of a ratio; busy rounds are marked."""

import itertools
import os
import random

import numpy as np
import pytest

from nanolib.measurement import Flag
from nanolib.meters import sampler as sampling
from nanolib.meters import turns
from nanolib.meters.interference import CpuLoad
from nanolib.meters.sampler import BlockSampler, Timing
from nanolib.meters.turns import Round, speed_up, speed_up_row, take_turns

from .conftest import FakeClock

RUNS, ROUNDS = int(os.environ.get("NANOLIB_SIMULATIONS", "200")), 30


def _slow_downs(generator, count):
    """A common factor per stretch of time: now and then a neighbor takes a third or more."""
    factors, busy = np.ones(count), False
    for at in range(count):
        busy = generator.random() < (0.8 if busy else 0.1)
        factors[at] = generator.uniform(1.3, 2.0) if busy else 1.0
    return factors


def _coverage(in_rounds):
    """In rounds, or all of the baseline first: its blocks' partners are then of another time."""
    held, ratio = 0, 4.0
    for seed in range(RUNS):
        generator = np.random.default_rng(seed)
        first, then = np.split(_slow_downs(generator, 2 * ROUNDS), 2)
        base = first * np.exp(generator.normal(0, 0.02, ROUNDS))
        own = (first if in_rounds else then) * np.exp(generator.normal(0, 0.02, ROUNDS))
        low, _, high = speed_up(ratio * base, own)
        held += low <= ratio <= high
    return held / RUNS


def test_the_interval_of_a_ratio_holds_the_truth_whatever_slows_the_machine_down():
    """Blocks that are taken one after the other fail the same test."""
    assert _coverage(in_rounds=False) < 0.85 < 0.93 <= _coverage(in_rounds=True) <= 0.97


class _Clock(FakeClock):
    """Time goes on as the blocks take it, and each block is written down."""

    def time_block(self, phases, calls, inner):
        self.taken.append(self.name)
        rows = super().time_block(phases, calls, inner)
        _Clock.now += np.sum(rows) / 1e3
        return rows


@pytest.fixture
def begun(monkeypatch):
    """Samplers of a few clocks that have begun, and whose blocks were taken since."""
    _Clock.now = 0.0
    quiet = CpuLoad(others=0.0, stolen=0.0)
    monkeypatch.setattr(sampling.time, "perf_counter", lambda: _Clock.now)
    monkeypatch.setattr(turns, "cpu_times", lambda: None)
    monkeypatch.setattr(turns, "load_between", lambda before, after: quiet)

    def begin(series, budget_s=1e9):
        taken, made = [], {}
        for name, ms in series.items():
            clock = _Clock(ms)
            clock.name, clock.taken = name, taken
            made[name] = BlockSampler(clock, Timing({"": lambda: None}, budget_s=budget_s))
            made[name].begin()
        taken.clear()
        return made, taken

    return begin


def test_each_round_takes_a_block_of_each_in_random_order(begun):
    samplers, taken = begun({"a": [10.0], "b": [12.0], "c": [15.0]})
    rounds = take_turns(samplers, seed=3)
    assert len(rounds) == 20 and all({*one.ms} == {"a", "b", "c"} for one in rounds)
    orders = {tuple(taken[at : at + 3]) for at in range(0, len(taken), 3)}
    assert orders == {*itertools.permutations("abc")}
    again, taken_again = begun({"a": [10.0], "b": [12.0], "c": [15.0]})
    take_turns(again, seed=3)
    assert taken_again == taken


def test_each_has_its_own_rule_and_budget_and_what_has_enough_takes_no_more(begun):
    noise = random.Random(1)
    noisy = [10 * noise.lognormvariate(0, 0.3) for _ in range(500)]
    samplers, taken = begun({"precise": [10.0], "noisy": noisy}, budget_s=0.5)
    rounds = take_turns(samplers, seed=0)
    assert (samplers["precise"].stop, samplers["noisy"].stop) == ("precision", "budget")
    # half a second of its own blocks, of 10 ms
    assert taken.count("precise") == 20 < taken.count("noisy") < 60
    assert speed_up_row(rounds, "precise", "noisy").n == 20


@pytest.mark.parametrize(
    ("rounds", "busy", "n"),
    [
        *((30, 0, 30), (30, 10, 20), (30, 11, 30)),
        *((8, 2, 6), (7, 2, 7), (12, 4, 12)),
    ],
)
def test_rounds_that_met_others_are_left_out_if_enough_clean_ones_remain(rounds, busy, n):
    """Twenty of them, or six that are three quarters of all."""
    found = []
    for at in range(rounds):
        b = np.array([9.0, 1.0]) if at < busy else np.array([3.0, 1.0])
        found.append(Round({"a": np.array([1.0, 1.0]), "b": b}, at < busy))
    row = speed_up_row(found, "a", "b", scope="forward")
    flagged = Flag.BUSY_MACHINE in row.flags
    assert (row.n, len(row.samples), flagged) == (n, n, n == rounds and busy > 0)
    assert (row.method, row.scope, row.confidence) == ("rounds", "forward", 0.95)
    assert row.details == {"rounds": rounds, "clean_rounds": rounds - busy}
    # the sum of both phases, and the second one
    assert flagged or row.estimate == pytest.approx(2.0)
    assert speed_up_row(found, "a", "b", phase=1).estimate == pytest.approx(1.0)
    assert speed_up_row(found[:5], "a", "b") is None


@pytest.mark.parametrize(
    ("watch_s", "first_busy", "busy"),
    # a reading every third round, of which the last one is as long as five, and one for all
    [(0.05, 1, [3, 4, 5, 9, 10, 11, 15, 16, 17, 18, 19]), (1e9, 0, [*range(20)])],
)
def test_rounds_are_labeled_by_the_load_of_their_time(
    begun, monkeypatch, watch_s, first_busy, busy
):
    """A round takes 20 ms, and every other reading finds others at work."""
    samplers, _ = begun({"a": [10.0], "b": [10.0]})
    monkeypatch.setattr(turns.time, "monotonic", lambda: _Clock.now)
    monkeypatch.setattr(turns, "shortest_watch_s", lambda: watch_s)
    readings = itertools.count()
    monkeypatch.setattr(turns, "cpu_times", lambda: next(readings))
    load = lambda before, after: CpuLoad(others=float(before % 2 == first_busy), stolen=0.0)  # noqa: E731
    monkeypatch.setattr(turns, "load_between", load)
    rounds = take_turns(samplers, seed=0)
    assert [at for at, one in enumerate(rounds) if one.is_busy] == busy


def test_rounds_that_are_too_short_for_a_reading_are_not_called_clean(begun, monkeypatch):
    samplers, _ = begun({"a": [10.0], "b": [10.0]})
    monkeypatch.setattr(turns, "load_between", lambda before, after: CpuLoad())
    rounds = take_turns(samplers, seed=0)
    assert {one.is_busy for one in rounds} == {None}
    assert speed_up_row(rounds, "a", "b").details["clean_rounds"] is None
