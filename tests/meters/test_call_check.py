"""What the first two calls of a timed function show."""

import concurrent.futures
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


def _thread():
    thread = threading.Thread(target=abs, args=(1,))
    thread.start()
    return thread


@pytest.mark.parametrize(
    "begins",
    [
        *(_coroutine, _thread, concurrent.futures.Future, torch.futures.Future),
        lambda: [concurrent.futures.Future()] * 2,
        lambda: map(abs, [-1]),
    ],
)
def test_a_call_that_only_begins_is_refused(begins, clocked):
    clocked([30.0])
    with pytest.raises(BadInput, match=r"^fn: a call only starts the work and returns an? "):
        measure(begins)


@pytest.fixture
def slow_once(monkeypatch):
    """A call that takes 75 ms at first, on the clock of the check, and then so many."""
    now = [0]
    monkeypatch.setattr(call_check, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def make(later_ms, result):
        times = iter([75.0])

        def call():
            now[0] += round(next(times, later_ms) * 1e6)
            return result()

        return call

    return make


X = torch.zeros(2)


@pytest.mark.parametrize(
    ("result", "later_ms", "cached"),
    [(X, 0.0004, True), (X, 0.75, True), (X, 0.76, False), ((X,), 0.75, True)],
)
def test_a_kept_result_is_flagged_if_later_calls_take_hardly_any_time(
    slow_once, clocked, result, later_ms, cached
):
    clocked([75.0, later_ms])
    phases = {"a": slow_once(later_ms, lambda: result), "b": slow_once(75.0, lambda: result)}
    rows = measure_phases(phases, budget_s=1e-9)
    assert [Flag.CACHED_RESULT in rows[scope].flags for scope in "ab"] == [cached, False]


@pytest.mark.parametrize(
    "result", [lambda: torch.zeros(2), lambda: X.add_(1), lambda: None, lambda: (torch.zeros(2),)]
)
def test_a_slow_first_call_alone_is_no_kept_result(slow_once, clocked, result):
    """It may have compiled: what it returns is new, is written to in place, or is nothing."""
    clocked([75.0, 0.0004])
    row = measure(slow_once(0.0004, result), budget_s=1e-9)
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
