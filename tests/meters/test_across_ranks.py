"""Blocks by hand, and calls on ranks, by a clock that stands still unless it is told."""

from functools import partial

import pytest
import torch

from nanolib.meters import ranks as communication
from nanolib.meters.ranks import Timer, time_across_ranks, time_parts_across_ranks

MS = 10**6  # nanoseconds


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks, of which this is the second; collectives are noted."""
    said = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    for name in ("barrier", "all_reduce", "all_gather_into_tensor", "all_to_all_single"):
        collective = lambda *x, name=name, **rest: said.append((name, *map(torch.numel, x)))  # noqa: E731
        monkeypatch.setattr(torch.distributed, name, collective)
    return said


def _timed(watch, clock, name, *ms):
    for each in ms:
        with watch.time_block(name):
            clock[0] += each * MS


def test_a_timer_adds_up_blocks_and_ranks_wait_for_each_other(clock, ranks, monkeypatch):
    def barrier():
        clock[0] += 10 * MS

    monkeypatch.setattr(torch.distributed, "barrier", barrier)
    watch, said = Timer(), []
    _timed(watch, clock, "comp_qk", 2, 4)
    with watch.time_block("load"):  # its time is without that of the sections in it
        clock[0] += 10 * MS
        _timed(watch, clock, "comm_lse", 1, 3)
    watch.print_stats(said.append)
    assert said[0].splitlines() == [
        "rank 1 of 2   calls   total s   mean ms     sd ms",
        "comp_qk           2     0.006     3.000     1.414",
        "wait              2     0.020    10.000     0.000",
        "comm_lse          2     0.004     2.000     1.414",
        "load              1     0.010    10.000     0.000",
    ]


def test_calls_of_all_ranks_are_blocks_of_five_milliseconds_in_one_order(clock, ranks):
    order = []

    def call(name, ms):
        order.append(name)
        clock[0] += ms * MS

    calls = {"a": partial(call, "a", 2), "b": partial(call, "b", 7)}
    found, _ = time_across_ranks(calls, 0.0, seed=3)
    assert found == {"a": pytest.approx([2.0] * 6), "b": pytest.approx([7.0] * 6)}
    # two calls say how long one takes
    assert (order.count("a"), order.count("b")) == (2 + 6 * 3, 2 + 6)
    first, order[:] = [*order], []
    time_across_ranks(calls, 0.0, seed=3)
    assert order == first  # on every rank the same
    assert ranks.count(("barrier",)) == 2 * 2 * (2 + 6)


def test_the_parts_of_a_call_are_those_of_its_timer_and_the_first_run_is_cold(clock, ranks):
    """They end, as all calls of ranks do, at the budget or after a hundred."""
    runs = []

    def call(timer):
        runs.append(1)
        _timed(timer, clock, "comp_x", len(runs))
        _timed(timer, clock, "load", 0.5, 0.5)

    found = time_parts_across_ranks({"a": call}, 0.0)
    assert found == {"a": [pytest.approx({"comp_x": run, "load": 1.0}) for run in range(2, 8)]}
    for budget_s, count in ((0.09, 7), (1e9, 100)):  # seven take 91 ms beyond the first
        assert len(time_parts_across_ranks({"a": call}, budget_s)["a"]) == count


def test_bytes_on_the_wire_are_those_of_a_call_beyond_those_of_none(ranks, monkeypatch):
    sent = [1000]

    def counted():
        sent[0] += 7  # what asking costs
        return sent[0]

    def call():
        sent[0] += 100

    monkeypatch.setattr(communication, "loopback_bytes", counted)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(communication, "has_private_network", lambda: True)
    assert communication.count_bytes(call) == 100 and sent[0] == 1000 + 3 * 100 + 4 * 7
    assert ranks.count(("barrier",)) == 8
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")  # past all interfaces
    assert communication.count_bytes(call) is None
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    monkeypatch.setattr(communication, "has_private_network", lambda: False)
    assert communication.count_bytes(call) is None


def test_collectives_of_four_sizes_say_what_they_send(ranks, monkeypatch):
    def blocks(calls, budget_s, *, device, seed):
        for call in calls.values():
            call()
        return {name: [name] for name in calls}, [False]

    monkeypatch.setattr(communication, "time_across_ranks", blocks)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    found = communication.time_collectives(1.0, seed=0)
    assert [(*row.values(),) for row in found[:3]] == [
        ("all_reduce", 1024, 6, 1.5 * 1024, ["all_reduce 1024"]),
        ("all_gather", 1024, 3, 3 * 1024, ["all_gather 1024"]),
        ("all_to_all", 1024, 3, 0.75 * 1024, ["all_to_all 1024"]),
    ]
    assert [row["payload"] for row in found[::3]] == [2**10, 2**16, 2**20, 2**22]
    gathered = ("all_gather_into_tensor", 1024, 256)
    assert ranks[:3] == [("all_reduce", 256), gathered, ("all_to_all_single", 256, 256)]
