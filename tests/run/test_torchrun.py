"""Two agents of torchrun on this machine: rank 0 stores the rows, and a lost node ends the run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanolib.store import Store
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
HANGING_S = 120
PARAMS = """
world_sizes: [1, 2]
seq_lens: [64]
algorithms: [gather]
prefill_seq_lens: []
memory_seq_lens: []
rank_timeout_s: 10
"""

pytestmark = pytest.mark.slow
_STARTED = []


def _start(folder, *arguments):
    """Two nodes, each with a rank; each is the leader of its own session."""
    (folder / "params.yml").write_text(PARAMS)
    (folder / "results").mkdir(exist_ok=True)
    meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    module = [
        "-m",
        "nanolib.run.torchrun",
        "distributed",
        "-f",
        str(folder / "params.yml"),
        *arguments,
    ]
    environment = os.environ | {"NANOLIB_OUTPUT": str(folder / "results"), "PYTHONPATH": str(ROOT)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    nodes = []
    for node in range(2):
        with (folder / f"{node}.log").open("w") as log:
            given = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *meeting,
                "--node-rank",
                str(node),
                *module,
            ]
            nodes.append(psutil.Popen(given, cwd=folder, env=environment, stdout=log, stderr=log))
    _STARTED.extend(nodes)
    return nodes


@pytest.fixture(autouse=True)
def _nothing_lives_on():
    yield
    for node in _STARTED:
        if node.is_running():
            _kill(node)
    _STARTED.clear()


def _kill(node):
    for process in [node, *node.children(recursive=True)]:
        process.kill()


def _said(folder):
    return "".join(log.read_text() for log in sorted(folder.glob("*.log")))


def test_one_case_goes_over_both_nodes_and_its_rows_are_stored_once(tmp_path):
    nodes = _start(tmp_path, "-p", "budget_s=0.05")
    assert [node.wait(HANGING_S) for node in nodes] == [0, 0], _said(tmp_path)
    with Store(tmp_path / "results" / "results.sqlite") as store:
        assert list(store.runs().status) == ["done"]
        ends = store.measurements().query("metric == 'case_duration'")
    assert set(ends.status) == {"ok"} and list(ends["factor.world_size"]) == [1, 2]
    assert ends["factor.nodes"].max() == 2


def test_a_lost_node_ends_the_run_in_one_line_and_resume_completes_it(tmp_path):
    several = ["-p", "budget_s=0.3", "-p", "world_sizes=[2]", "-p", "seq_lens=[64, 128, 192, 256]"]
    nodes = _start(tmp_path, *several)
    database = tmp_path / "results" / "results.sqlite"

    def first_case_has_ended():
        if not database.exists():
            return False
        with Store(database) as store:
            return (store.measurements()["status"] == "ok").any()

    end = time.monotonic() + HANGING_S
    while not first_case_has_ended():
        assert time.monotonic() < end, _said(tmp_path)
        time.sleep(0.05)
    _kill(nodes[1])
    assert nodes[0].wait(HANGING_S) == 1
    assert (
        _said(tmp_path).count(
            "RankLost: rank 1 of 2 does not answer; start all again with --resume"
        )
        == 1
    )
    with Store(database) as store:
        assert list(store.runs().status) == ["failed"]
    nodes = _start(tmp_path, *several, "--resume")
    assert [node.wait(HANGING_S) for node in nodes] == [0, 0], _said(tmp_path)
    with Store(database) as store:
        assert list(store.runs().status) == ["done"]
        assert list(store.measurements().query("metric == 'case_duration'").status) == ["ok"] * 4


def test_started_by_itself_it_says_so_in_one_line(tmp_path):
    (tmp_path / "params.yml").write_text("seq_lens: [0]\n")
    command = [sys.executable, "-m", "nanolib.run.torchrun", "distributed", "-f", "params.yml"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {
        "PYTHONPATH": str(ROOT)
    }
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGING_S
    )
    assert (
        ended.returncode == 2
        and "distributed.seq_lens" in ended.stderr
        and ended.stderr.count("\n") == 1
    )
