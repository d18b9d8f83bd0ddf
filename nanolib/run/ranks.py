"""Call a function on several ranks of this machine, and name the rank at fault if one fails.

    answers = run_ranks(rank, {"seq_len": 4096}, world_size=2, device="cpu", timeout_s=60)

Each rank calls the function with the request, inside a process group of its own. A rank that raises,
dies or hangs ends them all. `torch.multiprocessing` starts the ranks from one process, so that they
share a network of their own and, on a CPU, one import of torch. Under torchrun
(`nanolib.run.torchrun`) its processes are the ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import math
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from nanolib.measurement import Unsupported
from nanolib.meters.links import enter_private_network
from nanolib.models.functions import cause
from nanolib.run.process import Died, Late, call_in_process, exit_with_parent, signal_name

HANG_S = 60.0  # a rank that lets the others wait this long hangs
_GRACE_S = 2.0  # for a rank that is terminated, to write its stack
# The backends' messages when another rank has not come, or is gone.
_WAITING = r"timed out|timeout|connection (closed|reset|refused)|broken pipe"
# NCCL does not raise then: its watchdog writes this, and aborts the process that waited.
_WATCHDOG = r"\[Rank (\d+)\].*Watchdog caught collective operation timeout"

_launched: list[Any] = []  # at most one


class RankFailed(Exception):
    """A rank raised, died or hung.

    Attributes:
        details: The rank and its traceback, for the details of the case's row.
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = "") -> None:
        self.details = {"rank": rank, "traceback": traceback}
        super().__init__(message)


def use(launched: Any) -> None:
    """Run all cases of this process on ranks that torchrun has started; see its `Ranks`."""
    _launched[:] = [launched]


def nodes_of(world_size: int) -> int:
    """Return the number of machines of this many ranks."""
    return max((math.ceil(world_size / each.ranks_per_node) for each in _launched), default=1)


def lacking(device: str, world_size: int) -> str:
    """Return why this many ranks cannot run.

    NCCL refuses to share a GPU, and ranks on a CPU share its cores.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return f"torch.distributed has no backend for {kind}; give device cpu or cuda"
    for launched in _launched:
        if world_size > launched.world_size:
            return (
                f"{world_size} ranks are more than the {launched.world_size} "
                "that torchrun has started; give fewer"
            )
    here, gpus = math.ceil(world_size / nodes_of(world_size)), torch.cuda.device_count()
    if kind == "cuda" and here > gpus:
        return f"{here} ranks need as many GPUs, and {gpus} are here; give fewer ranks"
    return ""


def run_ranks(
    body: Callable[[dict[str, Any]], Any],
    request: dict[str, Any],
    *,
    world_size: int,
    device: str,
    timeout_s: float,
    threads: int = 1,
    rank_timeout_s: float = HANG_S,
    private_network: bool = False,
) -> list[Any]:
    """Call a function in `world_size` processes.

    Args:
        body: A function of a module that each rank can import; it takes the request.
        request: JSON types.
        world_size: How many ranks.
        device: `cpu` (gloo) or `cuda` (NCCL, one GPU each).
        timeout_s: All of it may take this long.
        threads: Of each rank, on a CPU.
        rank_timeout_s: A rank may wait this long for another.
        private_network: Whether the ranks get a network of their own, if the system allows it.

    Returns:
        What each rank answered (JSON types), in order.

    Raises:
        RankFailed: One raised, died or hung.
        Unsupported: More ranks than GPUs.
    """
    if reason := lacking(device, world_size):
        raise Unsupported(reason)
    asked = {
        "module": body.__module__,
        "function": body.__qualname__,
        "request": request,
        "world_size": world_size,
        "device": device,
        "threads": threads,
        "rank_timeout_s": min(rank_timeout_s, timeout_s),
    }
    for launched in _launched:
        return launched.run(asked)
    with TemporaryDirectory(prefix="nanolib-ranks-") as folder:
        given = Path(folder), asked, timeout_s, private_network
        try:
            found = next(call_in_process(_launch, *given, limit_s=timeout_s + 60))
        except (Died, Late) as error:
            raise RankFailed(f"ranks: {error}") from None
    if isinstance(found, RankFailed):
        raise found
    return found


def _launch(
    send: Callable[[Any], None],
    folder: Path,
    request: Mapping[str, Any],
    timeout_s: float,
    private_network: bool,
) -> None:
    """Start the ranks in a process that has computed nothing, and send their answers or failure."""
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
    first, late_s = None, None
    try:
        while late_s is None and not context.join(0.05, _GRACE_S):
            late_s = timeout_s if time.monotonic() > deadline else None
    except torch.multiprocessing.ProcessExitedException as error:
        first = error.error_index, error.exit_code
    if late_s is not None:
        for process in context.processes:
            process.terminate()
    for process in context.processes:
        process.join(_GRACE_S)
    store = dist.FileStore(str(folder / "store"), request["world_size"])
    results = results_in(store, request["world_size"])
    if all("answer" in result for result in results):
        send([result["answer"] for result in results])
    else:
        send(failure(results, folder, late_s, first))


def _rank(rank: int, folder: Path, request: Mapping[str, Any], parent: int) -> None:
    """Run one rank."""
    exit_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stack = (folder / f"{rank}.stack").open("w")
    faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.seed()  # ranks that were forked would draw the same
    store = dist.FileStore(str(folder / "store"), request["world_size"])
    has_answered = answer(request, store, rank)
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
    world_size, timeout = request["world_size"], timedelta(seconds=request["rank_timeout_s"])
    try:
        torch.set_num_threads(request["threads"])
        own: dict[str, Any] = {"backend": "gloo"}
        if request["device"].startswith("cuda"):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            own = {"backend": "nccl", "device_id": device}  # or it is guessed at the first call
        store.set_timeout(timeout)
        own |= {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
        dist.init_process_group(**own)
        function = getattr(importlib.import_module(request["module"]), request["function"])
        result = {"answer": function(request["request"])}
    except Exception as error:
        waits = isinstance(error, RuntimeError) and re.search(_WAITING, str(error).lower())
        said = f"rank {rank} of {world_size} raised {cause(error)}", rank, traceback.format_exc()
        result = {"error": (bool(waits), time.time(), said)}
    store.set(f"result/{rank}", json.dumps(result))
    return "answer" in result


def results_in(store: dist.Store, world_size: int) -> list[dict[str, Any]]:
    """Return what `answer` set in the store, by rank; nothing for a rank that has not ended."""
    keys = [f"result/{rank}" for rank in range(world_size)]
    return [json.loads(store.get(key)) if store.check([key]) else {} for key in keys]


def raised_in(results: Sequence[Mapping[str, Any]]) -> tuple[RankFailed | None, bool]:
    """Return the error of the first rank that raised, and whether all only waited for another."""
    errors = [result["error"] for result in results if "error" in result]
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
            frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', text)  # the innermost
            at = frame and f"it was in {frame[3]} ({Path(frame[1]).name}:{frame[2]})"
            said = f"rank {rank} of {len(results)} {how}: {at or 'its stack is not known'}"
            return RankFailed(said, rank, text)
    return raised or RankFailed(f"no rank started{late}; see its traceback", -1, log)
