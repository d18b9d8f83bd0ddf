"""Where ranks meet nobody else listens, and nothing that comes from the network is run."""

import contextlib
import functools
import json
import os
import pickle
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from nanolib.measurement import BadInput
from nanolib.run.ranks import nodes
from nanolib.run.ranks.nodes import NodesMissing
from nanolib.run.ranks.ranks import run_ranks
from tests.ports import free_port
from tests.run import rank_bodies

pytestmark = pytest.mark.slow
BODIES = rank_bodies.__name__
SECRET = "of sixteen characters or more"
TRAINING = {
    **{"name": "tiny", "world_size": 2, "preset": "decoder_tiny", "strategies": ["ddp", "fsdp"], "seq_len": 8},
    "overrides": {"num_layers": 1, "d_model": 32, "num_heads": 2, "vocab_size": 64, "d_ff": 64},
    **{"batch_size": 1, "threads": 1, "device": "cpu", "seed": 0, "budget_s": 0.3},
}


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv(nodes.SECRET_VARIABLE, SECRET)


def _listening(process):
    """Addresses at which a process listens, as /proc has them; those in a network of its own apart."""
    with contextlib.suppress(OSError):
        files = list(Path(f"/proc/{process.pid}/fd").iterdir())
        sockets = set()
        for file in files:
            with contextlib.suppress(OSError):
                sockets.add(str(file.readlink()))
        private = Path(f"/proc/{process.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                _, address, _, state, *_, inode = line.split()[:10]
                if state == "0A" and f"socket:[{inode}]" in sockets:
                    yield private, address.rpartition(":")[0]


@contextlib.contextmanager
def _watched():
    """What all processes below this one listen at, meanwhile."""
    seen, over = set(), threading.Event()

    def look():
        while not over.is_set():
            for child in psutil.Process().children(recursive=True):
                seen.update(_listening(child))
            time.sleep(0.05)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@functools.cache
def _trained(private_network=False):
    """What two ranks answer that train, in which whatever unpickles fails, and at what anyone listened meanwhile."""
    with pytest.MonkeyPatch.context() as patch, _watched() as seen:
        patch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # as a user may have it, for scripts of his own
        request = {"world_size": 2, "device": "cpu", "timeout_s": 120, "private_network": private_network}
        answers = run_ranks(rank_bodies.train_without_pickle, TRAINING, **request)
    return answers, seen


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("private_network", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_during_training_on_ranks_all_listen_on_loopback(private_network):
    _, seen = _trained(private_network)
    assert seen and {address for _, address in seen} <= LOOPBACK


def test_nothing_is_unpickled_when_ranks_train():
    answers, _ = _trained()
    assert len(answers) == 2 and set(answers[0]["blocks"]) == {"alone", "local", "ddp", "fsdp"}


def _join(endpoint, secret=SECRET, **rest):
    """A node that joins, in a process of its own, and what it says."""
    from tests.run.test_nodes import _joined

    return _joined(endpoint, NANOLIB_SECRET=secret, **rest)


class _Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_where_nodes_meet_runs_nothing(tmp_path):
    endpoint = f"127.0.0.1:{free_port()}"
    over = threading.Event()

    def stranger():
        bad = pickle.dumps(_Touch(tmp_path / "made"))
        keys = [f"1/{name}" for name in ("here/1", "here/2", "report/1", "ranks/0", "ranks/default_pg/0")]
        keys += ["torch.rendezvous.nanolib-1", "1/ranks/torch.rendezvous.nanolib-1"]
        while not over.is_set():
            with contextlib.suppress(dist.DistError):
                store = dist.TCPStore(*nodes.address(endpoint), is_master=False, timeout=timedelta(seconds=1))
                for key in keys:
                    store.set(key, bad)
            time.sleep(0.05)

    thread = threading.Thread(target=stranger)
    thread.start()
    try:
        with _join(endpoint), contextlib.suppress(Exception):  # it may be disturbed; that is told
            rest = {"world_size": 2, "device": "cpu", "timeout_s": 20, "nodes": 2, "rendezvous": endpoint}
            run_ranks(rank_bodies.answer, {}, hang_s=5, **rest)
    finally:
        over.set()
        thread.join()
    assert not (tmp_path / "made").exists()


def test_a_wrong_secret_joins_nothing():
    endpoint = f"127.0.0.1:{free_port()}"
    rest = {"world_size": 2, "device": "cpu", "timeout_s": 60, "nodes": 2, "rendezvous": endpoint, "hang_s": 8}
    with _join(endpoint, "another of sixteen characters") as joined:
        assert joined.stdout.readline().startswith("waiting for")  # it has imported what it needs
        with pytest.raises(NodesMissing, match="1 of 2 nodes came within 8 s, 1 without the secret; on each other"):
            run_ranks(rank_bodies.answer, {}, **rest)
        joined.terminate()
        assert "launch" not in joined.stdout.read()


@pytest.fixture
def asker():
    """A store that anyone may have made, where a node waits to be asked, and what that node says."""
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    said, stop = [], {}
    thread = threading.Thread(
        target=lambda: stop.update(
            took=nodes.join(f"127.0.0.1:{port}", wait_s=3, log=said.append, packages=("nanolib", "tests"))
        )
    )
    thread.start()
    yield store, said
    thread.join()
    assert stop["took"] == 0


def _asked(store, about, seal, *, nonce=None):
    number = store.add("launches", 1)
    here = json.loads(json.loads(store.get(f"{number}/here/1"))["said"])
    asked = {"body": f"{BODIES}:answer", "request": {}, "device": "cpu", "threads": 1, "hang_s": 5, "nodes": 2}
    asked |= {"host": "127.0.0.1", "port": store.port, "launch": number, "ranks": 1, "versions": nodes._versions()}
    asked |= {"nonces": [nonce or here["nonce"]]}
    store.set(f"{number}/asked", seal(about.format(number), asked))


def test_what_is_asked_without_the_secret_is_not_run(asker, monkeypatch):
    store, said = asker

    def seal(about, asked):
        text = json.dumps(asked)
        return json.dumps({"said": text, "code": "0" * 64})

    _asked(store, "{}/asked", seal)
    deadline = time.monotonic() + 30
    while not any("launch 1: asked without this node's NANOLIB_SECRET; nothing was run" in line for line in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.05)


@pytest.mark.parametrize(("about", "nonce"), [("{}/asked", "of another launch"), ("7/asked", None)])
def test_what_was_asked_before_or_elsewhere_is_not_run_again(asker, about, nonce):
    store, said = asker
    _asked(store, about, nodes._sealed, nonce=nonce)
    time.sleep(0.5)
    assert not any("rank(s) of" in line for line in said)


@pytest.mark.parametrize(
    "said", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"said": 1, "code": 2}', b'{"code": "x"}']
)
def test_what_is_no_message_is_not_believed(said):
    assert nodes._unsealed("1/asked", said) is None


def test_a_message_is_believed_for_what_it_is_about_and_as_it_was_said():
    sealed = nodes._sealed("1/asked", {"a": 1})
    assert nodes._unsealed("1/asked", sealed.encode()) == {"a": 1}
    assert nodes._unsealed("2/asked", sealed.encode()) is None
    assert nodes._unsealed("1/asked", sealed.replace("1}", "2}").encode()) is None


@pytest.mark.parametrize("text", [None, "", "fifteen letters"])
def test_without_a_secret_one_line_says_how_to_make_one(monkeypatch, text):
    monkeypatch.delenv(nodes.SECRET_VARIABLE)
    if text is not None:
        monkeypatch.setenv(nodes.SECRET_VARIABLE, text)
    with pytest.raises(
        BadInput, match=f"NANOLIB_SECRET holds {len(text or '')} characters; set it on all nodes"
    ) as error:
        nodes.join("127.0.0.1:29400", wait_s=1, log=print)
    assert len(error.value.lines) == 1


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="this system has no /proc")
def test_the_store_listens_at_the_address_that_was_named_alone():
    endpoint = f"127.0.0.1:{free_port()}"
    store = nodes._serve(endpoint)
    assert {address for _, address in _listening(psutil.Process())} == {"0100007F"}
    assert store.port == int(endpoint.split(":")[1])
