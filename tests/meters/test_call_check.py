"""What the first two calls of a timed function show."""

import concurrent.futures
import threading
from types import SimpleNamespace

import pytest
import torch

from nanolib.measurement import BadInput, Flag
from nanolib.meters import call_check
from nanolib.meters.latency import measure, measure_phases
from nanolib.meters.sampler import Timing


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


KEPT = (torch.zeros(2),)


@pytest.mark.parametrize(
    ("result", "later_ms", "cached"),
    [
        (lambda: KEPT[0], 0.75, True),
        (lambda: KEPT[0], 0.76, False),
        (lambda: KEPT, 0.75, True),
        # a slow first call may have compiled: its result is new, is changed in place, or is nothing
        (lambda: torch.zeros(2), 0.0004, False),
        (lambda: KEPT[0].add_(1), 0.0004, False),
        (lambda: None, 0.0004, False),
    ],
)
def test_a_kept_result_is_flagged_if_later_calls_take_hardly_any_time(
    monkeypatch, clocked, result, later_ms, cached
):
    now = [0]
    monkeypatch.setattr(call_check, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def phase(later_ms):
        times = iter([75.0])

        def call():
            now[0] += round(next(times, later_ms) * 1e6)
            return result()

        return call

    clocked([75.0, later_ms])
    rows = measure_phases(Timing({"a": phase(later_ms), "b": phase(75.0)}, budget_s=1e-9))
    assert [Flag.CACHED_RESULT in rows[scope].flags for scope in "ab"] == [cached, False]
