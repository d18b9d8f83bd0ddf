"""Two nodes on this machine: the tests measure, a process beside them has joined."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.experiments.distributed import cases as distributed
from nanolib.measurement import BadInput
from nanolib.run.ranks import nodes
from nanolib.run.ranks.nodes import NodesMissing
from nanolib.run.ranks.ranks import RankFailed, run_ranks
from tests.ports import free_port
from tests.processes import said
from tests.run import rank_bodies

pytestmark = pytest.mark.slow
BODIES = rank_bodies.__name__


@pytest.fixture(autouse=True, scope="module")
def _secret():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOLIB_SECRET", "of sixteen characters or more")
        yield


@contextlib.contextmanager
def _joined(endpoint, packages=("nanolib", "tests"), wait_s=60, before="", **variables):
    script = f"""
        from nanolib.run.ranks import nodes
        {before}
        nodes.join({endpoint!r}, wait_s={wait_s}, log=lambda line: print(line, flush=True), packages={packages!r})
    """
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def other_node():
    """The endpoint at which another node has joined; the same for several launches, as in a run."""
    endpoint = f"127.0.0.1:{free_port()}"
    with _joined(endpoint):
        yield endpoint


def _run(body, request, endpoint, world_size=2, **rest):
    return run_ranks(
        getattr(rank_bodies, body),
        request,
        **{"world_size": world_size, "device": "cpu", "timeout_s": 120, "nodes": 2, "rendezvous": endpoint, **rest},
    )


def _ranks_of(pid):
    children = psutil.Process(pid).children(recursive=True)
    running = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in running if "nano rank" in said(child)]


def test_ranks_of_two_nodes_answer_in_order_launch_after_launch(other_node):
    for world_size in (4, 2):
        answers = _run("answer", {"a": [1]}, other_node, world_size)
        assert [answer["rank"] for answer in answers] == list(range(world_size))
        assert all(answer["sum"] == sum(range(world_size)) and answer["asked"] == {"a": [1]} for answer in answers)


@pytest.mark.parametrize(
    ("how", "said", "traceback"),
    [
        ("raise", "raised ValueError: two lines", 'raise ValueError("two'),
        ("die", "was killed by SIGKILL", ""),
        ("hang", r"let the others wait until they gave up: it was in misbehave \(rank_bodies.py", "in misbehave"),
    ],
)
def test_the_rank_whose_fault_it_is_is_named_also_on_the_other_node(other_node, how, said, traceback):
    with pytest.raises(RankFailed, match=f"rank 1 of 2 {said}") as failed:
        _run("misbehave", {"how": how, "rank": 1}, other_node, hang_s=8)
    assert traceback in failed.value.details["traceback"]
    assert not _ranks_of(os.getpid())


def test_ranks_that_take_too_long_are_ended_on_both_nodes(other_node, tmp_path, monkeypatch):
    rank_bodies.late_once_there(monkeypatch, tmp_path / "pid")
    with pytest.raises(RankFailed, match=r"rank 0 of 2 did not end within 40 s: it was in \w+ \("):
        _run("mark", {"file": str(tmp_path / "pid")}, other_node, timeout_s=40)
    assert not _ranks_of(os.getpid())


def test_without_another_node_one_line_says_what_to_run_there():
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        NodesMissing, match=f"1 of 2 nodes came within 1 s; on each other node run: nano join {endpoint}"
    ):
        _run("answer", {}, endpoint, hang_s=1)


def test_a_port_that_is_taken_is_told():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(NodesMissing, match=f"{endpoint} cannot be listened at"):
            _run("answer", {}, endpoint)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"packages": ("nanolib",)}, f"runs functions of nanolib alone, and not {BODIES}:answer"),
        ({"before": "nodes.nanolib.__version__ = '0'"}, "install the same on both"),
    ],
)
def test_a_node_that_must_not_take_part_says_why(options, said):
    endpoint = f"127.0.0.1:{free_port()}"
    with _joined(endpoint, **options), pytest.raises(NodesMissing, match=said):
        _run("answer", {}, endpoint)


def test_a_node_that_is_lost_ends_the_case_and_another_takes_its_place(monkeypatch):
    monkeypatch.setattr(nodes, "_SILENT_S", 5.0)
    endpoint = f"127.0.0.1:{free_port()}"
    with _joined(endpoint) as joined:
        os_kill = f"import os, signal; os.kill({joined.pid}, signal.SIGKILL)"
        with pytest.raises(
            RankFailed, match="1 of the other nodes is gone, with its ranks; start nano join there again"
        ):
            _run("call_then_wait", {"code": os_kill, "rank": 0}, endpoint)
    assert not _ranks_of(os.getpid())
    with _joined(endpoint):
        assert len(_run("answer", {}, endpoint)) == 2


def test_ranks_end_when_the_node_that_asked_is_lost_and_the_joined_one_waits_for_the_next(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    script = f"""
        from nanolib.run.ranks.ranks import run_ranks
        from tests.run import rank_bodies
        run_ranks(rank_bodies.spin, {{}}, world_size=2, device="cpu", timeout_s=300, nodes=2, rendezvous={endpoint!r})
    """
    asker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    with _joined(endpoint) as joined:
        end = time.monotonic() + 60
        while not (ranks := _ranks_of(joined.pid)) and time.monotonic() < end:
            time.sleep(0.1)
        asker.send_signal(signal.SIGKILL)
        asker.wait()
        gone, alive = psutil.wait_procs(ranks, timeout=30)
        assert gone and not alive
        assert len(_run("answer", {}, endpoint)) == 2


def test_a_joined_node_gives_up_after_its_time():
    endpoint = f"127.0.0.1:{free_port()}"
    said = []
    assert nodes.join(endpoint, wait_s=0.3, log=said.append) == 0
    assert said[-1] == "nothing was asked for 0.3 s; took part in 0 launch(es)"


def test_a_joined_node_waits_no_longer_for_a_port_that_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert nodes.join(f"127.0.0.1:{port}", wait_s=0.5, log=lambda line: None) == 0


@pytest.mark.skipif(not socket.has_ipv6 or "::1" not in str(psutil.net_if_addrs()), reason="no IPv6 here")
def test_a_host_may_be_an_address_of_ipv6():
    assert nodes.address("[::1]:29400") == nodes.address("::1:29400") == ("::1", 29400)
    assert nodes._own_address("::1") == "::1" and nodes._interface("::1") == nodes._interface("127.0.0.1")


@pytest.mark.parametrize(
    "endpoint", ["", "29400", "host:", "host:port", "host:0", "host:65536", ":29400", "0.0.0.0:29400", "[::]:29400"]
)
def test_a_rendezvous_is_a_host_and_a_port(endpoint):
    with pytest.raises(BadInput) as error:
        distributed.Params(nodes=2, world_sizes=[2], rendezvous=endpoint)
    (line,) = error.value.lines
    assert line == (
        f"distributed.rendezvous: {endpoint!r} is no HOST:PORT; give an address of this machine, such as 10.0.0.1:29400"
    )


def test_ranks_share_out_over_nodes_evenly_or_not_at_all():
    with pytest.raises(BadInput, match="world_sizes: 3 ranks do not share out over 2 nodes; give a multiple"):
        distributed.Params(nodes=2, world_sizes=[1, 3], rendezvous="a:1")
    params = distributed.Params(nodes=2, world_sizes=[1, 4], rendezvous="a:1", memory_seq_lens=[])
    assert {(case.world_size, case.nodes) for case in distributed.cases(params)} == {(1, 1), (4, 2)}
    one, four = distributed.cases(params)[:2]
    assert "nodes" not in one.factors and four.factors["nodes"] == 2
    assert str(four).startswith("decode 4 rank(s) on 2 nodes")


def test_the_command_tells_a_malformed_rendezvous_in_one_line():
    ended = CliRunner().invoke(main, ["join", "10.0.0.1"])
    assert ended.exit_code == 2
    assert ended.output == (
        "nano: rendezvous: '10.0.0.1' is no HOST:PORT; give an address of this machine, such as 10.0.0.1:29400\n"
    )
