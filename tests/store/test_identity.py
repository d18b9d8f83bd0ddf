import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.measurement import BadInput
from nanolib.paths import checkout
from nanolib.store import Store, identity
from nanolib.store.identity import alive, gone, host, pid_of, process_name
from tests.store.rows import make_run


@pytest.fixture(params=["proc", "psutil"])
def system(request, monkeypatch):
    """With /proc, and without."""
    if request.param == "psutil":
        exists = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: path != Path("/proc/self/stat") and exists(path))
    return request.param


def test_a_process_is_known_by_its_machine_number_and_beginning(system):
    _, pid, began = process_name().split(":")
    assert alive(process_name()) and int(pid) == os.getpid() == pid_of(process_name())
    assert not alive(f"elsewhere:{pid}:{began}") and not alive(f"{host()}:{2**22 + 1}:{began}")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    name = process_name(ended.pid)
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not alive(name)  # it has ended, and nobody has asked how
    ended.wait()
    assert not alive(name)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_a_step_of_the_clock_ends_no_process(monkeypatch):
    name = process_name()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() + 3600)
    assert alive(name)
    pid, (ticks, boot) = name.split(":")[1], name.split(":")[2].split("@")
    assert not alive(f"{host()}:{pid}:{int(ticks) + 1}@{boot}"), "a later process of the same number"
    assert not alive(f"{host()}:{pid}:{ticks}@00000000"), "of the same number and moment after another boot"


def test_without_proc_a_process_is_told_by_the_clock():
    pid, created = os.getpid(), psutil.Process().create_time()
    assert alive(f"{host()}:{pid}:{created + 0.5}") and not alive(f"{host()}:{pid}:{created + 1.5}")
    assert not alive(f"{host()}:{pid}:{created - 2}")


def test_a_process_that_proc_hides_is_alive_as_long_as_its_number_is_taken(monkeypatch):
    def gone(pid):
        raise FileNotFoundError

    monkeypatch.setattr(identity, "_began", gone)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert alive(f"{host()}:77:1@b")
    for error, lives in ((PermissionError, True), (ProcessLookupError, False)):
        monkeypatch.setattr(os, "kill", lambda pid, number, error=error: (_ for _ in ()).throw(error))
        assert alive(f"{host()}:77:1@b") is lives


@pytest.mark.parametrize(
    "rest", ["", ":", "1", "x:y", "-1:1@b", "0:1@b", "99999999999999999999:1@b", "1:nan", "1:", "1:x:y"]
)
def test_what_names_no_process_is_dead(rest):
    assert not alive(f"{host()}:{rest}")


# what is certain of a process that has ended


@pytest.fixture
def killed():
    """The name of a process that was killed."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        name = process_name(process.pid)
        assert alive(name) and not gone(name, Path(__file__))
        process.kill()
    return name


def test_a_killed_process_is_gone_and_one_out_of_sight_is_not(killed, tmp_path, monkeypatch):
    machine, pid, began = killed.split(":")
    ticks, place = began.split("@")
    boot, space = place.split(".")
    assert gone(killed, tmp_path / "x")
    for seen_elsewhere in (
        "",
        f"00000000:{pid}:{began}",  # another machine
        f"{machine}:{pid}:{ticks}@{boot}.{space}1",  # another container here
    ):
        assert not gone(seen_elsewhere, tmp_path / "x")
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 7)  # /proc numbers processes as another container does
    assert not gone(killed, tmp_path / "x")


def test_what_ran_before_this_boot_is_gone_where_no_other_machine_can_write(killed, tmp_path, monkeypatch):
    before = killed.replace(identity._boot(), "00000000")
    disks = [SimpleNamespace(mountpoint=str(folder)) for folder in tmp_path.parents if folder.is_mount()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda: disks)
    assert gone(before, tmp_path / "x")
    monkeypatch.setattr(psutil, "disk_partitions", list)  # a network file system is none of this machine's disks
    assert not gone(before, tmp_path / "x") and gone(killed, tmp_path / "x")
    monkeypatch.setattr(psutil, "disk_partitions", lambda: disks)
    monkeypatch.setattr(identity, "_boot", str)  # which is not told
    assert not gone(before, tmp_path / "x")


def test_whoever_only_looks_sees_that_a_run_was_killed_and_writes_nothing(killed, tmp_path):
    path = tmp_path / "results.sqlite"
    with Store(path) as store:
        store.add(make_run("dead", rows={}, process=killed))
        store.add(make_run("here", rows={}, process=process_name()))
        store.connection.execute("PRAGMA journal_mode = DELETE").fetchall()
    content = path.read_bytes()
    for arguments in (["runs", "--json"], ["runs"], ["clean", "--run", "dead", "--dry-run"]):
        ended = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path)])
        assert ended.exit_code == 0, ended.output
        if arguments[0] == "runs":
            assert ended.output.count("interrupted") == ended.output.count("running") == 1
    assert path.read_bytes() == content
    with Store(path) as store:
        with pytest.raises(BadInput, match="run: here is in flight; stop it first"):
            store.cleanup_old_runs(None, run_ids=["here"])
        assert store.cleanup_old_runs(None, run_ids=["dead"]) == ["dead"] and list(store.runs().run_id) == ["here"]


_IN_A_CONTAINER = """
import sys, time
from nanolib.store import Store
from nanolib.store.identity import process_name
from tests.store.rows import make_run

with Store(sys.argv[1]) as store:
    store.add(make_run("there", rows={}, process=process_name()))
    store.add(make_run("gone", rows={}, process=process_name().replace(":1:", ":9999:")))
    store.mark_dead_runs()
print("stored", flush=True)
time.sleep(600)
"""
_CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


def _has_containers():
    return bool(shutil.which("unshare")) and not subprocess.run([*_CONTAINER, "true"], capture_output=True).returncode


@pytest.mark.skipif(not _has_containers(), reason="this system makes no namespace of processes for us")
def test_what_runs_in_another_container_is_never_called_dead(tmp_path):
    path = tmp_path / "results.sqlite"
    command = [*_CONTAINER, sys.executable, "-c", _IN_A_CONTAINER, str(path)]
    with subprocess.Popen(command, cwd=checkout(), stdout=subprocess.PIPE, text=True) as container:
        try:
            assert container.stdout.readline() == "stored\n"
            with Store(path) as store:
                assert dict(store.runs().set_index("run_id").status) == {"there": "running", "gone": "interrupted"}
                store.mark_dead_runs()
                store.update_run("gone", status="running")
                assert set(store.runs().status) == {"running"}  # from here neither can be told
        finally:
            container.kill()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT status FROM runs WHERE run_id = 'there'").fetchone() == ("running",)
