"""Two agents of torchrun on this machine: rank 0 stores the rows, and a lost node ends the run."""

import os
import sys

import psutil
import pytest

from nanolib.paths import checkout
from nanolib.run.process import kill_tree
from tests.ports import free_port
from tests.processes import ended
from tests.waiting import until

HANGING_S = 120
PARAMS = """
world_sizes: [1, 2]
seq_lens: [64, 128]
algorithms: [gather]
prefill_seq_lens: []
memory_seq_lens: []
rank_timeout_s: 10
budget_s: 0.3
"""
# Rank 0 waits a shorter time for a lost rank, and no case may run without the ranks of torchrun.
MAIN = """
from nanolib.run import sweep, torchrun
sweep.run_in_process = None
torchrun._LATE_S = 5.0
torchrun.main()
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path):
    """Start two nodes with a rank each."""
    (tmp_path / "params.yml").write_text(PARAMS)
    (tmp_path / "main.py").write_text(MAIN)
    own = {
        "PYTHONPATH": str(checkout()),
        "GLOO_SOCKET_IFNAME": "lo",
        "NANOLIB_OUTPUT": str(tmp_path),
    }
    started = []

    def nodes():
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        main = ["main.py", "distributed", "-f", "params.yml"]
        for node in ("0", "1"):
            with (tmp_path / f"{node}.log").open("w") as log:
                command = [*torchrun, "--node-rank", node, *main]
                started.append(
                    psutil.Popen(
                        command, cwd=tmp_path, env=os.environ | own, stdout=log, stderr=log
                    )
                )
        return started[-2:]

    yield nodes
    for node in started:
        kill_tree(node.pid)


def _said(folder):
    return "".join(log.read_text() for log in sorted(folder.glob("*.log")))


def test_a_lost_node_ends_the_run_and_resume_completes_the_cases_of_both(tmp_path, start, store):
    nodes = start()
    until(lambda: (store.measurements()["status"] == "ok").any(), HANGING_S)
    kill_tree(nodes[1].pid)
    assert nodes[0].wait(HANGING_S) == 1
    lost = "RankLost: rank 1 of 2 does not answer; set resume: true, and start all ranks again"
    assert _said(tmp_path).count(lost) == 1
    assert list(store.runs().status) == ["failed"]
    with (tmp_path / "params.yml").open("a") as params:
        params.write("resume: true\n")
    nodes = start()
    assert [node.wait(HANGING_S) for node in nodes] == [0, 0], _said(tmp_path)
    assert list(store.runs().status) == ["done"]
    ends = store.measurements().query("metric == 'case_duration'")
    assert list(ends.status) == ["ok"] * 4 and set(ends["factor.world_size"]) == {2}
    assert ends["factor.nodes"].max() == 2


def test_started_by_itself_it_says_so_in_one_line(tmp_path):
    (tmp_path / "params.yml").write_text("seq_lens: [0]\n")
    command = sys.executable, "-m", "nanolib.run.torchrun", "distributed", "-f", "params.yml"
    done = ended(
        *command, cwd=tmp_path, env=os.environ | {"RANK": "0", "PYTHONPATH": str(checkout())}
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "distributed.seq_lens" in done.stderr
