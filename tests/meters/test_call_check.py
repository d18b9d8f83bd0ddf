"""What the first two calls of a timed function show."""

import concurrent.futures
import functools
import threading
from types import SimpleNamespace

import pytest
import torch

from nanolib.measurement import BadInput, Flag
from nanolib.meters.time import call_check
from nanolib.meters.time.call_check import CallCheck
from nanolib.meters.time.latency import measure, measure_phases


async def _coroutine():
    pass


def _generator():
    yield


def _thread():
    thread = threading.Thread(target=_generator)
    thread.start()
    return thread


BEGINS = (
    *(_coroutine, _generator, _thread),
    *(concurrent.futures.Future, torch.futures.Future),
    lambda: [concurrent.futures.Future()] * 2,
    lambda: map(abs, [-1]),
)


@pytest.mark.parametrize("begins", BEGINS)
def test_a_call_that_only_begins_is_refused_whatever_wraps_it(begins, clocked):
    clocked([30.0])
    for call in (begins, lambda: begins(), functools.partial(begins)):
        with pytest.raises(BadInput, match=r"^fn: a call only starts the work and returns an? "):
            measure(call)


@pytest.mark.parametrize("result", [None, [1.0], torch.zeros(2), range(3)])
def test_a_call_that_returns_what_it_has_computed_is_timed(result, clocked):
    clocked([30.0])
    assert measure(lambda: result, budget_s=1e-9).n == 6


@pytest.fixture
def spend(monkeypatch):
    """Lets ms pass on the clock of the check."""
    now = [0]
    monkeypatch.setattr(call_check, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def spend(ms):
        now[0] += round(ms * 1e6)

    return spend


def _slow_once(spend, first_ms, later_ms, result):
    times = iter([first_ms])

    def call():
        spend(next(times, later_ms))
        return result()

    return call


@pytest.mark.parametrize("result", [torch.zeros(2), (torch.zeros(2),)])
@pytest.mark.parametrize(("later_ms", "cached"), [(0.0004, True), (0.75, True), (0.76, False)])
def test_a_kept_result_is_flagged_if_later_calls_take_hardly_any_time(
    spend, clocked, result, later_ms, cached
):
    clocked([75.0, later_ms])
    rows = measure_phases(
        {"a": _slow_once(spend, 75.0, later_ms, lambda: result), "b": lambda: spend(1)},
        budget_s=1e-9,
    )
    assert [Flag.CACHED_RESULT in rows[scope].flags for scope in "ab"] == [cached, False]


def test_a_slow_first_call_alone_is_no_kept_result(spend, clocked):
    """It may have compiled: what it returns is new, is written to in place, or is nothing."""
    x = torch.zeros(2)
    for result in (
        lambda: torch.zeros(2),
        lambda: x.add_(1),
        lambda: None,
        lambda: (torch.zeros(2),),
    ):
        clocked([75.0, 0.0004])
        row = measure(_slow_once(spend, 75.0, 0.0004, result), budget_s=1e-9)
        assert Flag.CACHED_RESULT not in row.flags


def test_a_call_that_dynamo_gives_up_compiling_is_refused():
    torch._dynamo.reset()
    call = torch.compile(lambda x: x * 2, dynamic=False, backend="eager")
    said = r"^fn: torch would run part of the function uncompiled, beyond .*_limit \(3\)"
    with torch._dynamo.config.patch(recompile_limit=3), pytest.raises(BadInput, match=said):
        for length in range(2, 7):
            CallCheck(lambda n=length: call(torch.zeros(n)), "fn", BadInput)()
    torch._dynamo.reset()
    assert not torch._dynamo.config.fail_on_recompile_limit_hit  # as others have it
