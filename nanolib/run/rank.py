"""Start ranks, answer a request on each, and find the rank at fault if one failed."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from nanolib.meters.links import enter_private_network
from nanolib.models.functions import cause
from nanolib.run.process import exit_with_parent, signal_name

_GRACE_S = 2.0  # for a rank that is terminated, to write its stack
# The backends' messages when another rank has not come, or is gone.
_WAITING = r"timed out|timeout|connection (closed|reset|refused)|broken pipe"
# NCCL does not raise then: its watchdog writes this, and aborts the process that waited.
_WATCHDOG = r"\[Rank (\d+)\].*Watchdog caught collective operation timeout"


class RankFailed(Exception):
    """A rank raised, died or hung.

    Attributes:
        details: The rank and its traceback, for the details of the case's row.
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = "") -> None:
        self.details = {"rank": rank, "traceback": traceback}
        super().__init__(message)


def launch(
    send: Callable[[Any], None],
    folder: Path,
    request: Mapping[str, Any],
    timeout_s: float,
    private_network: bool,
) -> None:
    """Start the ranks in a process that has computed nothing, and wait for them.

    Sends their results, whether they were late, and the number and exit code of the first that
    failed.
    """
    with (folder / "log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, no end is reported
    loopback = "lo" if sys.platform == "linux" else "lo0"  # the ranks need no other interface
    os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    os.environ["OMP_NUM_THREADS"] = str(request["threads"])
    deadline = time.monotonic() + timeout_s
    if private_network:
        with contextlib.suppress(OSError):  # the ranks check whether they have one
            enter_private_network()
    with contextlib.suppress(Exception):  # once for all; a rank reports what is wrong with it
        importlib.import_module(request["module"])
    # neither CUDA nor the libraries of macOS survive a fork
    forks = sys.platform == "linux" and request["device"] == "cpu"
    context = torch.multiprocessing.start_processes(
        _rank,
        (folder, request, os.getpid()),
        request["world_size"],
        join=False,
        start_method="fork" if forks else "spawn",
    )
    first, late = None, False
    try:
        while not late and not context.join(0.05, _GRACE_S):
            late = time.monotonic() > deadline
    except torch.multiprocessing.ProcessExitedException as error:
        first = error.error_index, error.exit_code
    if late:
        for process in context.processes:
            process.terminate()
    for process in context.processes:
        process.join(_GRACE_S)
    store = dist.FileStore(str(folder / "store"), request["world_size"])
    send((results_in(store, request["world_size"]), late, first))


def _rank(rank: int, folder: Path, request: Mapping[str, Any], parent: int) -> None:
    """Run one rank."""
    exit_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)
    world_size = request["world_size"]
    os.environ["LOCAL_RANK"] = str(rank)
    torch.seed()  # ranks that were forked would draw the same
    has_answered = answer(request, dist.FileStore(str(folder / "store"), world_size), rank)
    sys.stdout.flush()
    if not has_answered:
        os._exit(1)  # ending the process group in order would wait for ranks that may be gone
    with contextlib.suppress(RuntimeError):  # all have answered
        dist.barrier()
    os._exit(0)  # gloo's threads abort now and then while they are torn down


def answer(request: Mapping[str, Any], store: dist.Store, rank: int) -> bool:
    """Call the function of a request, in a process group that is made for it and stays.

    What it returns or raises is set in the store, as JSON.

    Args:
        request: As `run_ranks` makes it.
        store: Where the ranks meet.
        rank: Which this is.

    Returns:
        Whether it returned.
    """
    world_size = request["world_size"]
    try:
        torch.set_num_threads(request["threads"])
        own: dict[str, Any] = {"backend": "gloo"}
        if request["device"].startswith("cuda"):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            own = {"backend": "nccl", "device_id": device}  # or it is guessed at the first call
        timeout = timedelta(seconds=request["rank_timeout_s"])
        store.set_timeout(timeout)
        dist.init_process_group(
            store=store, rank=rank, world_size=world_size, timeout=timeout, **own
        )
        function = getattr(importlib.import_module(request["module"]), request["function"])
        result = {"answer": function(request["request"])}
    except Exception as error:
        waits = isinstance(error, RuntimeError) and re.search(_WAITING, str(error).lower())
        said = f"rank {rank} of {world_size} raised {cause(error)}", rank, traceback.format_exc()
        result = {"error": said, "at": time.time(), "waiting": bool(waits)}
    store.set(f"result/{rank}", json.dumps(result))
    return "answer" in result


def results_in(store: dist.Store, world_size: int) -> list[dict[str, Any]]:
    """Return what `answer` set in the store, by rank; nothing for a rank that has not ended."""
    keys = [f"result/{rank}" for rank in range(world_size)]
    return [json.loads(store.get(key)) if store.check([key]) else {} for key in keys]


def raised_in(results: Sequence[Mapping[str, Any]]) -> tuple[RankFailed | None, bool]:
    """Return the error of the rank at fault, and whether it only waited for another rank.

    The rank at fault is the first that raised; one that only waited counts if all did.
    """
    errors = [
        (result["waiting"], result["at"], result["error"])
        for result in results
        if "error" in result
    ]
    waits, _, said = min(errors, default=(True, 0.0, None))
    return said and RankFailed(*said), waits


def failure(
    results: Sequence[Mapping[str, Any]],
    folder: Path,
    late_s: float | None,
    first: tuple[int, int] | None,
) -> RankFailed:
    """Return the failure of the rank at fault.

    It is the rank that raised first. If it only waited for another rank, it is the one that was
    killed, or that was still at work.

    Args:
        results: As `results_in` gives them.
        folder: Of the launch.
        late_s: The time limit that they reached, s; None if they did not.
        first: The rank that failed first, and its exit code.
    """
    raised, only_waited = raised_in(results)
    if not only_waited:
        return raised
    log = (folder / "log").read_text(errors="replace")
    waited = {int(rank) for rank in re.findall(_WATCHDOG, log)}
    rank, code = first or (-1, 0)
    if code < 0 and rank not in waited:
        said = f"rank {rank} of {len(results)} was killed by {signal_name(-code)}"
        return RankFailed(said, rank)
    late = "" if late_s is None else f" within {late_s:g} s"
    how = f"did not end{late}" if late else "let the others wait until they gave up"
    for rank, result in enumerate(results):
        stack = folder / f"{rank}.stack"
        if not result and rank not in waited and stack.is_file():
            text = stack.read_text(errors="replace")
            said = f"rank {rank} of {len(results)} {how}: {_innermost(text)}"
            return RankFailed(said, rank, text)
    return raised or RankFailed(f"no rank started{late}; see its traceback", -1, log)


def _innermost(stack: str) -> str:
    """Name the function of the first frame that faulthandler wrote, with its file and line."""
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    if not frame:
        return "its stack is not known"
    return f"it was in {frame[3]} ({Path(frame[1]).name}:{frame[2]})"
