"""The side of the ranks: what starts them, what each does, and whose fault it was if one failed."""

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
from collections.abc import Iterable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from nanolib.meters.links import enter_private_network
from nanolib.run.process import exit_with_parent, signal_name

GRACE_S = 2.0  # for writing where it is, when a rank is told to end
_LOG = "log"
# What the backends say when another rank has not come, or is gone.
_WAITING = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
)


class RankFailed(Exception):
    """A rank raised, died or hung.

    Attributes:
        details: Which, and its traceback; for the details of the case's row.
    """

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        self.details = {"rank": rank, "traceback": traceback}
        super().__init__(message)


def start_method(device: str) -> str:
    """How ranks begin: CUDA does not survive a fork of who has asked for it, nor do the libraries of macOS."""
    return "fork" if sys.platform == "linux" and device == "cpu" else "spawn"


def launch(
    connection: Connection,
    folder: Path,
    asked: dict[str, Any],
    timeout_s: float,
    private_network: bool,
) -> None:
    """In a process that has computed nothing: start the ranks, and tell whether they were late, and who ended first and how."""
    with (folder / _LOG).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # where it is ignored nobody learns how a rank ended
    deadline = time.monotonic() + timeout_s
    if private_network:
        with contextlib.suppress(
            OSError
        ):  # the ranks look whether they have one, and say so where not
            enter_private_network()
    if asked["body"].startswith("nanolib."):  # once for all; another's may fail, which a rank tells
        importlib.import_module(asked["body"].partition(":")[0])
    context = torch.multiprocessing.start_processes(
        _rank,
        (folder, asked, os.getpid()),
        asked["world_size"],
        join=False,
        start_method=start_method(asked["device"]),
    )
    first, late = None, False
    try:
        while not context.join(0.05, GRACE_S):
            if late := time.monotonic() > deadline:
                for process in context.processes:
                    process.terminate()
                deadline = math.inf
                break
        for process in context.processes:
            process.join(GRACE_S)
    except torch.multiprocessing.ProcessExitedException as error:
        first = error.error_index, error.exit_code
    connection.send((late, first))


def _rank(rank: int, folder: Path, asked: dict[str, Any], parent: int) -> None:
    """One rank: its answer, or what went wrong, is a file in the folder."""
    exit_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.register(
        signal.SIGTERM, (folder / f"{rank}.stack").open("w"), all_threads=False, chain=True
    )
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(asked["world_size"]),
    }
    torch.seed()  # ranks that were forked would draw the same
    told = answer(asked, dist.FileStore(str(folder / "store"), asked["world_size"]), rank)
    _write(
        folder / f"{rank}.{'error' if 'error' in told else 'json'}",
        told.get("error", told.get("answer")),
    )
    sys.stdout.flush()
    if "error" in told:
        os._exit(1)  # ending the process group in order would wait for ranks that may be gone
    with contextlib.suppress(RuntimeError):  # all have answered
        dist.barrier()
    os._exit(0)  # gloo's threads abort now and then while they are torn down


def answer(asked: dict[str, Any], store: dist.Store, rank: int) -> dict[str, Any]:
    """In a process group that is made for it and stays: `answer`, or `error` with `rank`, `message`, `traceback`, `waiting`.

    Args:
        asked: As `run_ranks` makes it.
        store: Where the ranks meet.
        rank: Which this is.
    """
    try:
        torch.set_num_threads(asked["threads"])
        own: dict[str, Any] = {}
        if asked["device"].startswith("cuda"):
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
            own = {"device_id": device}  # or NCCL guesses it at the first collective
        timeout = timedelta(seconds=asked["hang_s"])
        store.set_timeout(timeout)
        dist.init_process_group(
            "nccl" if own else "gloo",
            store=store,
            rank=rank,
            world_size=asked["world_size"],
            timeout=timeout,
            **own,
        )
        module, _, function = asked["body"].partition(":")
        return {"answer": getattr(importlib.import_module(module), function)(asked["request"])}
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        waiting = isinstance(error, dist.DistError | RuntimeError) and any(
            w in message.lower() for w in _WAITING
        )
        said = {
            "rank": rank,
            "message": message,
            "traceback": traceback.format_exc(),
            "waiting": waiting,
        }
        return {"error": said}


def _write(path: Path, value: Any) -> None:
    """Whole or not at all: the reader may come at any moment."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(value))
    half.replace(path)


def raised(errors: Iterable[Mapping[str, Any]], world_size: int) -> tuple[RankFailed, bool]:
    """The error of the rank whose fault it was, and whether that is known: of those that only waited it is not.

    Args:
        errors: As `answer` gives them, in the order in which they came; at least one.
        world_size: How many ranks there are.
    """
    error = min(errors, key=lambda error: error["waiting"])
    said = f"rank {error['rank']} of {world_size} raised {error['message']}"
    return RankFailed(said, error["rank"], error["traceback"]), not error["waiting"]


def failure(
    folder: Path, world_size: int, late_s: float | None, first: tuple[int, int] | None
) -> RankFailed:
    """Whose fault it was: who raised first; if that was only waiting for another, the one that was waited for.

    Args:
        folder: Of the launch.
        world_size: How many ranks there are.
        late_s: The limit that they have reached; None where they have not.
        first: The rank that ended first, and its exit code.
    """
    files = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    failed, is_known = (
        raised(map(json.loads, map(Path.read_text, files)), world_size) if files else (None, False)
    )
    if failed and is_known:
        return failed
    log = (folder / _LOG).read_text(errors="replace")
    # NCCL does not raise where another rank has not come: its watchdog writes so, and aborts the process that waited.
    waited = {
        int(rank)
        for rank in re.findall(r"\[Rank (\d+)\].*Watchdog caught collective operation timeout", log)
    }
    if first and first[1] < 0 and first[0] not in waited:
        return RankFailed(
            f"rank {first[0]} of {world_size} was killed by {signal_name(-first[1])}", first[0], ""
        )
    for rank in range(world_size):
        stack = folder / f"{rank}.stack"
        has_ended = any((folder / f"{rank}.{end}").is_file() for end in ("json", "error"))
        if not has_ended and rank not in waited and stack.is_file():
            text = stack.read_text(errors="replace")
            said = (
                "let the others wait until they gave up"
                if late_s is None
                else f"did not end within {late_s:g} s"
            )
            return RankFailed(f"rank {rank} of {world_size} {said}: {_innermost(text)}", rank, text)
    if failed:
        return failed
    lines = [line for line in log.splitlines() if line.strip() and "*****" not in line]
    within = "" if late_s is None else f" within {late_s:g} s"
    return RankFailed(
        f"no rank started{within}: {lines[-1] if lines else 'their process said nothing'}", -1, log
    )


def _innermost(stack: str) -> str:
    """`function (file:line)` of the first frame that faulthandler wrote, without its folder."""
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    return (
        f"it was in {frame[3]} ({Path(frame[1]).name}:{frame[2]})"
        if frame
        else "where it was is not known"
    )
