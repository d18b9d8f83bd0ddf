"""Ranks answer in order, an error names the rank at fault, and no rank survives the call."""

import contextlib
import signal

import psutil
import pytest

from nanolib.run.ranks import RankFailed, run_ranks
from tests.run import rank_bodies

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def _nothing_stays_behind():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if "resource_tracker" not in " ".join(child.cmdline())]


def _run(body, request=(), **changes):
    return run_ranks(
        body, dict(request), **{"world_size": 1, "device": "cpu", "timeout_s": 120} | changes
    )


def test_ranks_answer_in_order_with_their_threads_and_draw_numbers_of_their_own():
    with _nothing_stays_behind():
        answers = _run(rank_bodies.answer, {"a": [1]}, world_size=2, threads=2)
    one, other = (answer.pop("drawn") for answer in answers)
    same = {"sum": 1, "threads": 2, "asked": {"a": [1]}}
    assert answers == [{"rank": 0} | same, {"rank": 1} | same] and one != other


@pytest.mark.parametrize(
    ("how", "rank", "said", "traceback"),
    [
        ("raise", 1, "rank 1 of 2 raised ValueError: two lines", 'raise ValueError("two'),
        ("die", 0, "rank 0 of 2 was killed by SIGKILL", ""),
        (
            "hang",
            1,
            r"rank 1 of 2 did not join a collective before the others timed out: it was in misbehave \(",
            "in misbehave",
        ),
    ],
)
def test_the_rank_whose_fault_it_is_is_named_with_its_traceback(how, rank, said, traceback):
    request = {"how": how, "rank": rank}
    with _nothing_stays_behind(), pytest.raises(RankFailed, match=said) as failed:
        _run(rank_bodies.misbehave, request, world_size=2, rank_timeout_s=4)
    assert failed.value.details["rank"] == rank and traceback in failed.value.details["traceback"]


def test_ranks_that_take_too_long_are_ended_where_they_are():
    with (
        _nothing_stays_behind(),
        pytest.raises(RankFailed, match=r"rank 0 of 1 did not end within 15 s: it was in spin"),
    ):
        _run(rank_bodies.spin, timeout_s=15)


def test_ranks_end_where_the_signal_that_says_so_is_ignored():
    """A supervisor may ignore the signal, and its children inherit that."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert len(_run(rank_bodies.answer)) == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_ranks_cannot_import_is_said():
    with pytest.raises(RankFailed, match=r"rank 0 of 1 raised ModuleNotFoundError: .*nothing'"):
        body = type("Body", (), {"__module__": "nanolib.nothing", "__qualname__": "rank"})
        _run(body)
