"""Ranks: they answer in order, whoever fails is named, and none outlives who started them."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from nanolib.run.ranks import launcher, ranks
from nanolib.run.ranks.ranks import RankFailed, run_ranks
from tests.processes import said
from tests.run import rank_bodies


@contextlib.contextmanager
def _nothing_stays_behind():
    """No process of ours, and no port that it listened on."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not [one for one in psutil.process_iter() if "nano rank" in said(one) and one.ppid() in (1, os.getpid())]


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({launcher.start_method(device) for device in ("cpu", "cuda")}))
def test_ranks_answer_in_order_with_their_threads(method, monkeypatch):
    monkeypatch.setattr(launcher, "start_method", lambda device: method)
    with _nothing_stays_behind():
        answers = run_ranks(rank_bodies.answer, {"a": [1]}, world_size=2, device="cpu", timeout_s=120, threads=2)
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert all(answer["sum"] == 1 and answer["threads"] == 2 and answer["asked"] == {"a": [1]} for answer in answers)


@pytest.mark.slow
@pytest.mark.skipif(launcher.start_method("cpu") != "fork", reason="ranks are forked on Linux alone")
def test_where_the_system_has_no_room_for_a_rank_that_is_what_is_said(tmp_path, monkeypatch):
    full = "import os\n\ndef fork():\n    raise BlockingIOError(11, 'no more processes')\n\nos.fork = fork\n"
    (tmp_path / "sitecustomize.py").write_text(full)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RankFailed, match=r"no rank started: BlockingIOError: \[Errno 11\] no more processes"):
        run_ranks(rank_bodies.answer, {}, world_size=2, device="cpu", timeout_s=120)


@pytest.mark.slow
def test_ranks_draw_numbers_of_their_own():
    drawn = run_ranks(rank_bodies.draw, {}, world_size=2, device="cpu", timeout_s=120)
    assert all(one != other for one, other in zip(*drawn, strict=True))


@pytest.mark.slow
def test_ranks_end_where_the_signal_that_says_so_is_ignored(monkeypatch):
    """A supervisor may have it so, and what it starts inherits that."""
    late, wait = [], ranks._await
    monkeypatch.setattr(ranks, "_await", lambda *given: late.append(wait(*given)) or late[-1])
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert len(run_ranks(rank_bodies.draw, {}, world_size=1, device="cpu", timeout_s=40)) == 1
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert late == [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rank", "said", "traceback"),
    [
        ("raise", 1, "rank 1 of 2 raised ValueError: two lines", 'raise ValueError("two'),
        ("die", 0, "rank 0 of 2 was killed by SIGKILL", ""),
        (
            "hang",
            1,
            r"rank 1 of 2 let the others wait until they gave up: it was in misbehave \(rank_bodies.py",
            "in misbehave",
        ),
    ],
)
def test_the_rank_whose_fault_it_is_is_named_with_its_traceback(how, rank, said, traceback):
    request = {"how": how, "rank": rank}
    with _nothing_stays_behind(), pytest.raises(RankFailed, match=said) as failed:
        run_ranks(rank_bodies.misbehave, request, world_size=2, device="cpu", timeout_s=120, hang_s=4)
    assert failed.value.details["rank"] == rank and traceback in failed.value.details["traceback"]


@pytest.mark.slow
def test_ranks_that_take_too_long_are_ended_where_they_are(tmp_path, monkeypatch):
    rank_bodies.late_once_there(monkeypatch, tmp_path / "pid")
    with _nothing_stays_behind(), pytest.raises(RankFailed, match=r"did not end within 40 s: it was in \w+ \("):
        run_ranks(rank_bodies.mark, {"file": str(tmp_path / "pid")}, world_size=1, device="cpu", timeout_s=40)


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    script = f"""
        from nanolib.run.ranks.ranks import run_ranks
        from tests.run import rank_bodies
        run_ranks(rank_bodies.mark, {{"file": {str(tmp_path / "pid")!r}}}, world_size=1, device="cpu", timeout_s=300)
    """
    starter = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert starter.poll() is None
        time.sleep(0.05)
    rank = psutil.Process(int((tmp_path / "pid").read_text()))
    starter.kill()
    starter.wait()
    psutil.wait_procs([rank], timeout=30)
    assert not rank.is_running()


@pytest.mark.slow
def test_two_launches_at_once_do_not_meet():
    script = """
        from nanolib.run.ranks.ranks import run_ranks
        from tests.run import rank_bodies
        print(run_ranks(rank_bodies.answer, {}, world_size=2, device="cpu", timeout_s=120)[1]["sum"])
    """
    both = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in both] == ["1.0", "1.0"]
