"""Processes of versions are forked from one that has imported what they share, and end with it."""

import os
import signal
import sys
from dataclasses import replace
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
    return [Version(name, "", folder / name, Path(), folder / name) for name in works]


@pytest.fixture
def version(tmp_path):
    return _versions(
        tmp_path, a="import os, wave\ndef run():\n    pass\ndef dies():\n    os._exit(7)\n"
    )[0]


def _asked(process, function="run"):
    return process.ask(do="function", function=f"work:{function}", setup="")


def _parent(process):
    return psutil.Process(process._pid).ppid()


def _serve_once(processes):
    for process in processes:
        _asked(process)
        process.time_block(1, keep=True)
        process.ask(do="next")


def test_all_but_the_first_are_forked_from_one_process_which_is_replaced(version, monkeypatch):
    monkeypatch.setattr("nanolib.ab.processes.CHILDREN", 2)
    with Processes([version, version], fork=True) as sides:
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
    with Processes(_versions(tmp_path, **works), fork=True) as sides:
        first = sides.renew()
        assert not any("wave" in process.ask(do="imports")["modules"] for process in first)
        _serve_once(first)
        for process in sides.renew():
            told = process.ask(do="imports")["modules"]
            assert {"wave", "netrc"} <= set(told) and "colorsys" not in told


SETS = "the code sets environment variables"
ON_GPU = """
import sys, types
def synchronize(): pass
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].cuda = types.SimpleNamespace(
    is_initialized=lambda: True, synchronize=synchronize)
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os\nos.environ['WHO'] = '1'", SETS),
        ("import os\ndef run(): os.environ.setdefault('WHO', '1')", SETS),
        ("import sets_variables", ""),  # its import before the fork does so too
        (ON_GPU, "the code uses a GPU"),
        ("import library", "a package imports own of this repository"),
    ],
)
def test_code_that_a_fork_would_change_imports_by_itself(tmp_path, monkeypatch, text, reason):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # both versions import from it
    (tmp_path / "sets_variables.py").write_text("import os\nos.environ['BY_A_LIBRARY'] = '1'")
    (tmp_path / "library.py").write_text("try:\n    import own\nexcept ImportError:\n    pass\n")
    logged = []
    versions = _versions(tmp_path, a=f"def run(): pass\n{text}") * 2
    (versions[0].root / "own.py").touch()
    with Processes(versions, fork=True, log=logged.append) as sides:
        _serve_once(sides.renew())
        processes = sides.renew()
        assert [process.is_forked for process in processes] == [not reason] * 2
        # Threads of code on CPUs stay on their cores, forked or not. A process that has just
        # been started may still show no variables.
        for process in processes:
            _asked(process)
        environments = [psutil.Process(process._pid).environ() for process in processes]
        assert ["OMP_PROC_BIND" in one for one in environments] == ["GPU" not in reason] * 2
    assert [line.partition(", so")[0] for line in logged] == [reason] * bool(reason)


def test_how_a_forked_version_ended_is_told(version):
    with ForkServer() as server:
        with VersionProcess(version, server) as process:
            assert "timing" in _asked(process, "dies")
            with pytest.raises(VersionDied, match="the process exited with code 7"):
                process.time_block(1, keep=True)
        with VersionProcess(version, server) as process:
            os.kill(process._pid, signal.SIGSEGV)
            with pytest.raises(VersionDied, match="was killed by SIGSEGV"):
                _asked(process)


def test_a_fork_server_that_is_killed_is_one_line(version):
    with Processes([version], fork=True) as sides:
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
    made = _versions(tmp_path, a=work, b=work, main=work)
    for version in made:
        (version.root / "lib").mkdir()
        (version.root / "lib" / "pkg.py").write_text(f"WHO = {version.name!r}\n")
    versions = [replace(version, top=tmp_path / "main") for version in made[:2]]
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.chdir(tmp_path / "main")
    monkeypatch.syspath_prepend(tmp_path / "main" / "lib")  # as Python does in a fresh `nano`
    with Processes(versions, fork=True) as sides:
        for expected_forks in (False, True):
            for process in sides.renew():
                _asked(process)
                assert process.is_forked == expected_forks
                with pytest.raises(VersionDied, match=f": {process.version.name}$"):
                    process.time_block(1, keep=True)
