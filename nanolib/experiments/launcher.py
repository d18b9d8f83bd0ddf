"""One machine's share of the ranks: processes that torchrun starts in a folder where the request lies and answers are put."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from nanolib.experiments import launch

GRACE_S = 3.0  # for writing where it is, when a rank is told to end
LOG = "launcher.log"


def start(
    folder: Path,
    asked: dict[str, Any],
    *,
    ranks: int,
    meeting: Sequence[str] = ("--standalone", "--local-addr", "127.0.0.1"),
    interface: str = "lo",
    private_network: bool = False,
) -> subprocess.Popen[bytes]:
    """Start ranks, which read `asked` and write their answers into the folder.

    Args:
        folder: Theirs alone.
        asked: JSON types; see `nanolib.experiments.rank`.
        ranks: How many, here.
        meeting: Of torchrun's arguments, those that say where they meet ranks on other machines.
        interface: Of the network, through which they do.
        private_network: Whether they get a network of their own, where the system allows it.
    """
    (folder / "request.json").write_text(json.dumps(asked))
    command = [
        *(sys.executable, "-m", launch.__name__),
        *([launch.PRIVATE_NETWORK] if private_network else []),
        *("torch.distributed.run", *meeting),
        *("--nproc-per-node", str(ranks), "-m", "nanolib.experiments.rank", str(folder)),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
        "OMP_NUM_THREADS": str(asked["threads"]),
        "PYTHONWARNINGS": "ignore",
    }
    if sys.platform == "linux":
        if interface == "lo":
            environment["GLOO_SOCKET_IFNAME"] = interface  # NCCL finds its own way within a machine
        else:
            environment = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | environment
    with (folder / LOG).open("w") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)


def end_ranks(folder: Path) -> None:
    """Have the ranks write where they are, and end."""
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)


def end_tree(process: subprocess.Popen[Any], grace_s: float = 0.0) -> None:
    """End a process and all its descendants, sessions of their own included: asked first, and then for certain.

    Args:
        process: The one that was started.
        grace_s: How long they have between the two, s.
    """
    if process.poll() is not None:
        return
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(tree, timeout=grace_s)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
