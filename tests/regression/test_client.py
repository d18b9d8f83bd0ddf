import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanolib.measurement import BadInput
from nanolib.regression.client import ForkServer, Sides, VersionDied, VersionProcess
from nanolib.regression.worktree import Version

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="versions are forked under Linux alone"),
]


@pytest.fixture
def version(tmp_path):
    (tmp_path / "work.py").write_text("import os, wave\ndef run():\n    pass\ndef dies():\n    os._exit(7)\n")
    return Version("a", "", tmp_path, Path())


def _asked(process, function="run"):
    return process.ask(do="function", function=f"work:{function}", setup="", rows=False)


def _parent(process):
    return psutil.Process(process._process.pid).ppid()


def _runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_both_sides_are_forked_from_one_process_which_is_replaced(version, monkeypatch):
    monkeypatch.setattr("nanolib.regression.client.CHILDREN", 2)
    with Sides([version, version], 60, forks=True, modules=["wave"]) as sides:
        seen = []
        for _ in range(5):
            a, b = sides.renew()
            assert _parent(a) == _parent(b) != os.getpid()
            seen += [_parent(a)]
            pids = [a._process.pid, b._process.pid]
        assert seen == [seen[0]] * 2 + [seen[2]] * 2 + [seen[4]] and len(set(seen)) == 3
        assert not psutil.pid_exists(seen[0])
    assert not any(psutil.pid_exists(pid) for pid in [*seen, *pids])


def test_what_all_versions_imported_is_imported_before_the_next_are_forked(version, tmp_path):
    for name, later in (("one", "import cgitb, wave"), ("two", "import wave, cgitb, chunk")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "work.py").write_text(f"def run():\n    pass\ndef make():\n    {later}\n")
    versions = [Version(name, "", tmp_path / name, Path()) for name in ("one", "two")]
    with Sides(versions, 60, forks=True) as sides:
        for process in sides.renew():
            assert "wave" not in process.ask(do="tell")["modules"]
            assert "timing" in process.ask(do="function", function="work:run", setup="work:make", rows=False)
            process.ask(do="next")
        for process in sides.renew():
            told = process.ask(do="tell")["modules"]
            assert {"wave", "cgitb"} <= set(told) and "chunk" not in told


def test_how_a_forked_version_ended_is_told(version):
    server = ForkServer(60)
    with VersionProcess(version, 60, server) as process, pytest.raises(VersionDied, match="its process ended with 7"):
        assert "timing" in _asked(process, "dies")
        process.time_block(1, keep=True)
    with VersionProcess(version, 60, server) as process:
        os.kill(process._process.pid, signal.SIGSEGV)
        with pytest.raises(VersionDied, match="was killed by SIGSEGV"):
            _asked(process)
    server.close()


def test_a_fork_server_that_is_killed_is_one_line(version):
    with Sides([version], 60, forks=True) as sides:
        (process,) = sides.renew()
        child = process._process.pid
        os.kill(_parent(process), signal.SIGKILL)
        with pytest.raises(BadInput, match=r"forked from: .*(ended with -9|Broken pipe)"):
            sides.renew()
    deadline = time.monotonic() + 30
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def test_an_answer_that_an_interrupt_kept_from_being_read_is_not_taken_for_the_next(
    version, tmp_path_factory, monkeypatch
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "lasts.py").write_text("import time\ntime.sleep(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    server = ForkServer(60)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            server.imports(["lasts"])
        with VersionProcess(version, 60, server) as process:
            assert "lasts" in process.ask(do="tell")["modules"]
    finally:
        signal.signal(signal.SIGALRM, before)
        server.close()
