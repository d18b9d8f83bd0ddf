"""Call a function on several ranks of this machine, and find the rank at fault if a rank fails.

    answers = run_ranks(rank, {"seq_len": 4096}, world_size=2, device="cpu", timeout_s=60)

Each rank calls the function with the request, here `{"seq_len": 4096}`, in a new process group. If
a rank raises an exception, dies or hangs, all ranks end. `torch.multiprocessing` starts the ranks
from one process, so the ranks can share a private network. On a CPU under Linux, the ranks also
share one import of torch.
"""

import contextlib
import importlib
import json
import math
import os
import re
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

from nanolib.measurement import Unsupported, cause
from nanolib.meters.ranks import enter_private_network
from nanolib.run.process import Died, call_in_process, exit_with_parent

Message = Mapping[str, Any]  # A request or a result, of JSON types.
HANG_S = 60.0  # Longest time that a rank waits for another rank, s.
_GRACE_S = 2.0  # Longest wait for the end of a terminated rank, s.
_MOST_LOG = 4000  # Maximum length of a log in the details of a failure, in characters.
# Backends raise errors with these words if another rank is late or has ended.
_WAITING = r"timed out|timeout|connection (closed|reset|refused)|broken pipe"

_launched: Any = None  # The `Ranks` of torchrun, if any.


class RankFailed(Died):
    """A rank raised an exception, died or hung.

    Attributes:
        details: Number of the rank and its traceback, for the row of the case.
    """

    def __init__(self, message: str, rank: int = -1, traceback: str = ""):
        self.details = {"rank": rank, "traceback": traceback}
        super().__init__(message)


def use(launched) -> None:
    """Run all later cases of this process on the ranks of torchrun."""
    global _launched
    _launched = launched


def under_torchrun() -> bool:
    """Return whether the cases of this process run on the ranks of torchrun."""
    return _launched is not None


def nodes_of(world_size: int) -> int:
    """Return the number of machines that `world_size` ranks need."""
    return math.ceil(world_size / _launched.ranks_per_node) if _launched else 1


def lacking(device: str, world_size: int) -> str:
    """Return why this number of ranks cannot run, or an empty string.

    On GPUs, each rank needs its own GPU, because NCCL cannot share a GPU. On a CPU, all ranks
    share the cores.
    """
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return f"torch.distributed has no backend for {kind}; give device cpu or cuda"
    if _launched and world_size > _launched.world_size:
        return (
            f"{world_size} ranks are more than the {_launched.world_size} "
            "that torchrun has started; give fewer ranks"
        )
    here, gpus = math.ceil(world_size / nodes_of(world_size)), torch.cuda.device_count()
    if kind == "cuda" and here > gpus:
        return f"{here} ranks need as many GPUs, and this machine has {gpus}; give fewer ranks"
    return ""


def run_ranks(
    body: Callable[[Message], Any],
    request: Message,
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
        body: Function that each rank calls, in a module that each rank can import.
        request: Argument of the function, of JSON types.
        world_size: Number of ranks.
        device: Device of the ranks: `cpu` for gloo, or `cuda` for NCCL with a GPU for each rank.
        timeout_s: Time limit of the call, s.
        threads: Number of threads of each rank on a CPU.
        rank_timeout_s: Longest time that a rank waits for another rank, s.
        private_network: Whether to give the ranks a private network, if the system allows it.

    Returns:
        The result of each rank, of JSON types, in the order of the ranks.

    Raises:
        Died: The process that starts the ranks ended.
        RankFailed: A rank raised an exception, died or hung.
        Unsupported: This machine has too few devices for the ranks.
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
        "timeout_s": timeout_s,
        "private_network": private_network,
        "rank_timeout_s": min(rank_timeout_s, timeout_s),
    }
    if _launched:
        return _launched.run(asked)
    with TemporaryDirectory(prefix="nanolib-ranks-") as name:
        folder, limit_s = Path(name), timeout_s + 60
        return next(call_in_process(_launch, folder, asked, limit_s=limit_s, log=folder / "log"))


def _launch(send: Callable[[Any], None], folder: Path, request: Message):
    """Start the ranks from a process without threads, and send all results.

    Raises:
        RankFailed: A rank raised an exception, died or hung.
    """
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ |= {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": str(request["threads"]),
    }
    deadline = time.monotonic() + request["timeout_s"]
    if request["private_network"]:
        with contextlib.suppress(OSError):
            enter_private_network()
    # The ranks share this import. If the import fails, the ranks report the error.
    with contextlib.suppress(Exception):
        importlib.import_module(request["module"])
    # Neither CUDA nor the system libraries of macOS work after a fork.
    forks = sys.platform == "linux" and request["device"] == "cpu"
    context = torch.multiprocessing.start_processes(
        _rank,
        (folder, request, os.getpid()),
        request["world_size"],
        join=False,
        start_method="fork" if forks else "spawn",
    )
    killed, how = None, "did not join a collective before the others timed out"
    try:
        while not context.join(0.05, _GRACE_S):
            if time.monotonic() > deadline:
                how = f"did not end within {request['timeout_s']:g} s"
                break
    except torch.multiprocessing.ProcessExitedException as error:
        if error.exit_code < 0:
            killed, how = error.error_index, f"was killed by {error.signal_name}"
    store = dist.FileStore(str(folder / "store"), request["world_size"])
    results = results_in(store, request["world_size"])
    silent = [rank for rank, result in enumerate(results) if not result]
    raised, only_waited = raised_in(results)
    # If all errors are from waits, the rank at fault was killed or did not end.
    if silent and only_waited:
        rank = silent[0] if killed is None else killed
        log = (folder / "log").read_text(errors="replace")
        raise RankFailed(f"rank {rank} of {len(results)} {how}", rank, log[-_MOST_LOG:])
    if raised:
        raise raised
    send([result["answer"] for result in results])


def _rank(rank: int, folder: Path, request: Message, parent: int):
    exit_with_parent(parent)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.seed()  # Forked ranks would otherwise draw equal random numbers.
    store = dist.FileStore(str(folder / "store"), request["world_size"])
    has_answered = answer(request, store, rank)
    sys.stdout.flush()
    # A normal exit would wait for lost ranks, and gloo's threads sometimes abort the process.
    os._exit(0 if has_answered else 1)


def answer(request: Message, store: dist.Store, rank: int) -> bool:
    """Call the function of a request in a new process group, and store its result as JSON.

    The caller ends the process group.

    Args:
        request: Request from `run_ranks`.
        store: Store that all ranks share.
        rank: Number of this rank.

    Returns:
        Whether the function returned without an exception.
    """
    world_size, timeout = request["world_size"], timedelta(seconds=request["rank_timeout_s"])
    try:
        torch.set_num_threads(request["threads"])
        backend, own = "gloo", {"rank": rank, "world_size": world_size, "timeout": timeout}
        if request["device"].startswith("cuda"):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            backend, own["device_id"] = "nccl", device  # torch would otherwise guess a device.
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, **own)
        function = getattr(importlib.import_module(request["module"]), request["function"])
        store.set(f"result/{rank}", json.dumps({"answer": function(request["request"])}))
    except Exception as error:
        waits = isinstance(error, RuntimeError) and re.search(_WAITING, str(error).lower())
        message = f"rank {rank} of {world_size} raised {cause(error)}"
        details = bool(waits), time.time(), (message, rank, traceback.format_exc())
        store.set(f"result/{rank}", json.dumps({"error": details}))
        return False
    with contextlib.suppress(RuntimeError):  # Another rank may have stored its result and ended.
        dist.barrier()
    return True


def results_in(store: dist.Store, world_size: int) -> list[Message]:
    """Return each rank's result from `answer`, or an empty dict for a rank without a result."""
    keys = [f"result/{rank}" for rank in range(world_size)]
    return [json.loads(store.get(key)) if store.check([key]) else {} for key in keys]


def raised_in(results: Sequence[Message]) -> tuple[RankFailed | None, bool]:
    """Return the first error, preferably not from a wait, and whether all errors are from waits."""
    errors = [result["error"] for result in results if "error" in result]
    waits, _, failed = min(errors, default=(True, 0.0, None))
    return failed and RankFailed(*failed), waits
