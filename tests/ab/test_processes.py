import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanolib.ab.children import ForkServer, VersionDied, VersionProcess
from nanolib.ab.processes import Processes
from nanolib.ab.versions import Version
from nanolib.measurement import BadInput

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="versions are forked under Linux alone"),
]


@pytest.fixture
def version(tmp_path):
    (tmp_path / "work.py").write_text(
        "import os, wave\ndef run():\n    pass\ndef dies():\n    os._exit(7)\n"
    )
    return Version("a", "", tmp_path, Path())


def _asked(process, function="run"):
    return process.ask(do="function", function=f"work:{function}", setup="", rows=False)


def _parent(process):
    return psutil.Process(process._pid).ppid()


def _runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _must_end(pid):
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _serve_once(processes):
    for process in processes:
        _asked(process)
        process.time_block(1, keep=True)
        process.ask(do="next")


def test_all_but_the_first_are_forked_from_one_process_which_is_replaced(version, monkeypatch):
    monkeypatch.setattr("nanolib.ab.processes.CHILDREN", 2)
    with Processes([version, version], 60, fork=True) as sides:
        first = sides.renew()
        assert not any(process.is_forked for process in first)
        _serve_once(first)
        seen = []
        for _ in range(5):
            a, b = sides.renew()
            assert _parent(a) == _parent(b) != os.getpid()
            seen += [_parent(a)]
            pids = [a._pid, b._pid]
        assert seen == [seen[0]] * 2 + [seen[2]] * 2 + [seen[4]] and len(set(seen)) == 3
        assert not psutil.pid_exists(seen[0])
    assert not any(psutil.pid_exists(pid) for pid in [*seen, *pids])


def test_what_all_versions_imported_is_imported_before_the_next_are_forked(version, tmp_path):
    for name, later in (("one", "import netrc, wave"), ("two", "import wave, netrc, colorsys")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "work.py").write_text(f"def run():\n    {later}\n")
    versions = [Version(name, "", tmp_path / name, Path()) for name in ("one", "two")]
    with Processes(versions, 60, fork=True) as sides:
        first = sides.renew()
        assert not any("wave" in process.ask(do="imports")["modules"] for process in first)
        _serve_once(first)
        for process in sides.renew():
            told = process.ask(do="imports")["modules"]
            assert {"wave", "netrc"} <= set(told) and "colorsys" not in told


@pytest.mark.parametrize(
    ("text", "forks"),
    [
        ("import os\nos.environ['WHO'] = '1'\ndef run(): pass", False),
        ("import os\ndef run(): os.environ.setdefault('WHO', '1')", False),
        ("import os\nos.environ.get('HOME')\ndef run(): pass", True),
        ("import sets_variables\ndef run(): pass", True),  # and so does who imports it beforehand
    ],
)
def test_code_that_sets_variables_imports_by_itself(tmp_path, elsewhere, text, forks):
    elsewhere(sets_variables="import os\nos.environ['BY_A_LIBRARY'] = '1'")
    (tmp_path / "work.py").write_text(text + "\n")
    said = []
    version = Version("a", "", tmp_path, Path())
    with Processes([version, version], 60, fork=True, log=said.append) as sides:
        _serve_once(sides.renew())
        assert [process.is_forked for process in sides.renew()] == [forks] * 2
        assert ["sets environment variables" in line for line in said] == [True] * (not forks)


@pytest.fixture
def server():
    made = ForkServer(60)
    yield made
    made.close()


def test_how_a_forked_version_ended_is_told(version, server):
    with VersionProcess(version, 60, server) as process:
        assert "timing" in _asked(process, "dies")
        with pytest.raises(VersionDied, match="the process ended with 7"):
            process.time_block(1, keep=True)
    with VersionProcess(version, 60, server) as process:
        os.kill(process._pid, signal.SIGSEGV)
        with pytest.raises(VersionDied, match="was killed by SIGSEGV"):
            _asked(process)


def test_a_fork_server_that_is_killed_is_one_line(version):
    with Processes([version], 60, fork=True) as sides:
        _serve_once(sides.renew())
        (process,) = sides.renew()
        child = process._pid
        os.kill(_parent(process), signal.SIGKILL)
        with pytest.raises(BadInput, match="forked from: the process was killed by SIGKILL"):
            sides.renew()
    _must_end(child)


@pytest.fixture
def elsewhere(tmp_path_factory, monkeypatch):
    """A folder that both versions import from; what modules lie in it, and what they say."""
    folder = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(**modules):
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)

    return write


def test_a_relative_path_for_imports_leads_into_each_version(tmp_path, monkeypatch):
    work = "from pkg import WHO\ndef run():\n    raise RuntimeError(WHO)\n"
    for name in ("a", "b", "main"):
        (tmp_path / name / "lib").mkdir(parents=True)
        (tmp_path / name / "lib" / "pkg.py").write_text(f"WHO = {name!r}\n")
        (tmp_path / name / "work.py").write_text(work)
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.chdir(tmp_path / "main")
    versions = [Version(name, "", tmp_path / name, Path()) for name in "ab"]
    with Processes(versions, 60, fork=True) as sides:
        for process, name in zip(sides.renew(), "ab", strict=True):
            _asked(process)
            with pytest.raises(VersionDied, match=f": {name}$"):
                process.time_block(1, keep=True)
