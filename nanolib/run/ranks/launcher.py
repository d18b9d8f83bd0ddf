"""One machine's share of the ranks: processes in a folder where the request lies and answers are put.

`-m nanolib.run.ranks.launcher FOLDER` starts them, each with torchrun's variables (RANK, LOCAL_RANK, WORLD_SIZE, ...), and ends
them all when one fails. Ranks on a CPU, which share its cores, are forked from it, so that torch is imported once for all of them.
On one machine they meet at a file in that folder: nothing listens but gloo, on loopback. Over nodes they meet at the store where
the launch was asked for; see `nodes`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nanolib.run.launch import command, die_with_parent
from nanolib.run.process import import_path

GRACE_S = 3.0  # for writing where it is, when a rank is told to end
LOG = "launcher.log"
_REQUEST = "request.json"
_POLL_S = 0.05
_RANK = "nanolib.run.ranks.rank"  # it imports torch
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def start_method(device: str) -> str:
    """How ranks begin: CUDA does not survive a fork of who has asked for it, nor do the libraries of macOS."""
    return "fork" if sys.platform == "linux" and device == "cpu" else "spawn"


def start(
    folder: Path,
    asked: dict[str, Any],
    *,
    ranks: int,
    node: int = 0,
    nodes: int = 1,
    interface: str = "",
    private_network: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ranks, which read `asked` and write their answers into the folder.

    Args:
        folder: Theirs alone.
        asked: JSON types; see `nanolib.run.ranks.rank`.
        ranks: How many, here.
        node: Which of the machines this is, from 0.
        nodes: How many machines have as many.
        interface: Of the network, through which they meet those on other machines.
        private_network: Whether they get a network of their own, where the system allows it.
    """
    share = {"first": node * ranks, "ranks": ranks, "world_size": nodes * ranks, "by": start_method(asked["device"])}
    (folder / _REQUEST).write_text(json.dumps(asked | {"share": share}))
    environment = os.environ | {
        "PYTHONPATH": import_path(),
        "OMP_NUM_THREADS": str(asked["threads"]),
        "PYTHONWARNINGS": "ignore",
    }
    if interface and interface != _LOOPBACK.get(sys.platform):
        environment = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | environment
    elif sys.platform in _LOOPBACK:  # whatever the user says of other networks: none is needed
        loopback = _LOOPBACK[sys.platform]
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    started = command(__name__, str(folder), private_network=private_network)
    with (folder / LOG).open("w") as log:
        return subprocess.Popen(started, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def end_ranks(process: subprocess.Popen[bytes]) -> None:
    """Have the ranks of a launcher write where they are, and end."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2 * GRACE_S)


def main() -> None:
    """Start the ranks and wait for them; exits with 1 where one fails, which ends the others."""
    folder = Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored nobody learns how a rank ended
    asked = json.loads((folder / _REQUEST).read_text())
    share, parent = asked["share"], os.getpid()
    if share["by"] == "fork":
        importlib.import_module(_RANK)
        if (body := asked["body"].partition(":")[0]).startswith("nanolib."):  # another's may fail, which a rank tells
            importlib.import_module(body)
    context, ranks = multiprocessing.get_context(share["by"]), {}
    try:
        for local in range(share["ranks"]):
            number = share["first"] + local
            variables = {"RANK": number, "LOCAL_RANK": local, "WORLD_SIZE": share["world_size"]}
            variables |= {"LOCAL_WORLD_SIZE": share["ranks"]}
            ranks[number] = context.Process(target=_rank, args=(folder, asked, variables, parent))
            ranks[number].start()
        codes: dict[int, int | None] = dict.fromkeys(ranks)
        while None in codes.values() and not any(codes.values()):
            time.sleep(_POLL_S)
            codes = {number: one.exitcode for number, one in ranks.items()}
        for number, code in codes.items():
            if code:  # what a rank that died cannot tell itself
                (folder / f"{number}.ended").write_text(str(code))
        sys.exit(any(codes.values()))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        begun = [one for one in ranks.values() if one.pid]
        for one in begun:
            one.terminate()
        end = time.monotonic() + GRACE_S
        for one in begun:
            one.join(max(0.0, end - time.monotonic()))
            one.kill()


def _rank(folder: Path, asked: dict[str, Any], variables: dict[str, int], parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # what `ps` and `top` call it, where that can be said
        Path("/proc/self/comm").write_text(f"nano rank {variables['RANK']}")
    os.environ.update({name: str(value) for name, value in variables.items()})
    importlib.import_module(_RANK).main(folder, asked)
