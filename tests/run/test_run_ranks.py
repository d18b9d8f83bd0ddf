"""Ranks answer in order, an error names the rank at fault, and no rank survives the call."""

import psutil
import pytest

from nanolib.run.ranks import RankFailed, run_ranks
from tests.processes import said
from tests.run import rank_bodies

pytestmark = pytest.mark.slow


@pytest.fixture
def run():
    """Call a function on ranks, none of which survives."""

    def called(body, request=(), **changes):
        rest = {"world_size": 1, "device": "cpu", "timeout_s": 120} | changes
        return run_ranks(body, dict(request), **rest)

    before = psutil.Process().children(recursive=True)
    yield called
    left = set(psutil.Process().children(recursive=True)) - {*before}
    assert not [child for child in left if "resource_tracker" not in said(child)]


def test_ranks_answer_in_order_with_their_threads_and_draw_numbers_of_their_own(run):
    answers = run(rank_bodies.answer, {"a": [1]}, world_size=2, threads=2)
    one, other = (answer.pop("drawn") for answer in answers)
    same = {"sum": 1, "threads": 2, "asked": {"a": [1]}}
    assert answers == [{"rank": 0} | same, {"rank": 1} | same] and one != other


@pytest.mark.parametrize(
    ("how", "rank", "words", "traceback"),
    [
        ("raise", 1, "raised ValueError: two lines", 'raise ValueError("two'),
        ("raise alone", 1, "raised RuntimeError: two lines", 'raise RuntimeError("two'),
        ("die", 0, "was killed by SIGKILL", "Watchdog caught collective operation timeout"),
        ("hang", 1, "did not join a collective before the others timed out", ""),
    ],
)
def test_the_rank_whose_fault_it_is_is_named_with_its_traceback(run, how, rank, words, traceback):
    with pytest.raises(RankFailed, match=f"rank {rank} of 2 {words}") as failed:
        run(rank_bodies.misbehave, {"how": how, "rank": rank}, world_size=2, rank_timeout_s=4)
    assert failed.value.details["rank"] == rank and traceback in failed.value.details["traceback"]


def test_ranks_that_take_too_long_are_ended_where_they_are(run):
    with pytest.raises(RankFailed, match=r"rank 0 of 1 did not end within 15 s"):
        run(rank_bodies.spin, timeout_s=15)


def test_what_ranks_cannot_import_is_said(run):
    with pytest.raises(RankFailed, match=r"rank 0 of 1 raised ModuleNotFoundError: .*nothing'"):
        run(type("Body", (), {"__module__": "nanolib.nothing", "__qualname__": "rank"}))
