"""Processes of versions are forked from one that has imported what they share, and end with it."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from nanolib.ab.children import ForkServer, VersionDied, VersionProcess
from nanolib.ab.processes import Processes
from nanolib.ab.versions import Version
from nanolib.measurement import BadInput
from tests.processes import said
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="versions are forked under Linux alone"),
]


def _versions(folder, **works):
    """Versions by name, each in its folder with its text of `work.py`."""
    for name, text in works.items():
        (folder / name).mkdir()
        (folder / name / "work.py").write_text(text)
    return [Version(name, "", folder / name, Path()) for name in works]


@pytest.fixture
def version(tmp_path):
    work = "import os, wave\ndef run():\n    pass\ndef dies():\n    os._exit(7)\n"
    return _versions(tmp_path, a=work)[0]


def _asked(process, function="run"):
    return process.ask(do="function", function=f"work:{function}", setup="", rows=False)


def _parent(process):
    return psutil.Process(process._pid).ppid()


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
            seen.append(_parent(a))
        pids = [a._pid, b._pid]
        assert seen == [seen[0]] * 2 + [seen[2]] * 2 + [seen[4]] and len(set(seen)) == 3
        assert not psutil.pid_exists(seen[0])
    assert not any(psutil.pid_exists(pid) for pid in [*seen, *pids])


def test_what_all_versions_imported_is_imported_before_the_next_are_forked(tmp_path):
    imports = {"one": "import netrc, wave", "two": "import wave, netrc, colorsys"}
    works = {name: f"def run():\n    {line}\n" for name, line in imports.items()}
    with Processes(_versions(tmp_path, **works), 60, fork=True) as sides:
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
        ("import sets_variables\ndef run(): pass", True),  # its import before the fork does so too
    ],
)
def test_code_that_sets_variables_imports_by_itself(tmp_path, monkeypatch, text, forks):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # both versions import from it
    (tmp_path / "sets_variables.py").write_text("import os\nos.environ['BY_A_LIBRARY'] = '1'")
    logged = []
    versions = _versions(tmp_path, a=text) * 2
    with Processes(versions, 60, fork=True, log=logged.append) as sides:
        _serve_once(sides.renew())
        assert [process.is_forked for process in sides.renew()] == [forks] * 2
    assert ["sets environment variables" in line for line in logged] == [True] * (not forks)


def test_how_a_forked_version_ended_is_told(version):
    with ForkServer(60) as server:
        with VersionProcess(version, 60, server) as process:
            assert "timing" in _asked(process, "dies")
            with pytest.raises(VersionDied, match="the process exited with code 7"):
                process.time_block(1, keep=True)
        with VersionProcess(version, 60, server) as process:
            os.kill(process._pid, signal.SIGSEGV)
            with pytest.raises(VersionDied, match="was killed by SIGSEGV"):
                _asked(process)


def test_a_fork_server_that_is_killed_is_one_line(version):
    with Processes([version], 60, fork=True) as sides:
        _serve_once(sides.renew())
        (process,) = sides.renew()
        child = psutil.Process(process._pid)
        os.kill(child.ppid(), signal.SIGKILL)
        with pytest.raises(
            BadInput, match="fork server of both versions: the process was killed by SIGKILL"
        ):
            sides.renew()
    until(lambda: not said(child))


def test_a_relative_path_for_imports_leads_into_each_version(tmp_path, monkeypatch):
    work = "from pkg import WHO\ndef run():\n    raise RuntimeError(WHO)\n"
    *versions, main = _versions(tmp_path, a=work, b=work, main=work)
    for version in (*versions, main):
        (version.root / "lib").mkdir()
        (version.root / "lib" / "pkg.py").write_text(f"WHO = {version.name!r}\n")
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.chdir(main.root)
    with Processes(versions, 60, fork=True) as sides:
        for process in sides.renew():
            _asked(process)
            with pytest.raises(VersionDied, match=f": {process.version.name}$"):
                process.time_block(1, keep=True)
