"""Several processes at work on one case: started by torchrun, ended with the case whatever happens, answers as files.

    answers = run_ranks("nanolib.experiments.decoding:rank", {"seq_len": 4096}, world_size=2, device="cpu", timeout_s=60)

Each rank calls the function with the request, inside a process group of its own, and its answer (JSON types) comes back in order
of rank. A rank that raises, dies or hangs ends them all, and its traceback is what the case says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from nanolib.experiments import launch
from nanolib.measurement import Flag, Unsupported

CaseT = TypeVar("CaseT")

HANG_S = 60.0  # a rank that lets the others wait this long hangs
_GRACE_S = 3.0  # for writing where it is, when it is told to end


class RankFailed(Exception):
    """A rank raised, died or hung.

    Attributes:
        details: Which, and its traceback; for the details of the case's row.
    """

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        self.details = {"rank": rank, "traceback": traceback}
        super().__init__(message)


def check_ranks(device: str, world_size: int) -> None:
    """Whether this machine has a device for each rank; ranks on a CPU share its cores.

    Raises:
        Unsupported: More ranks than GPUs, which NCCL refuses, or a device without a backend.
    """
    kind = torch.device(device).type
    if kind == "cuda" and world_size > torch.cuda.device_count():
        raise Unsupported(
            f"{world_size} ranks need as many GPUs, and {torch.cuda.device_count()} are here; give fewer ranks"
        )
    if kind not in ("cpu", "cuda"):
        raise Unsupported(f"torch.distributed has no backend for {kind}; give device cpu or cuda")


def oversubscribed(device: str, world_size: int, threads: int) -> bool:
    """Whether the ranks together want more cores, or GPUs, than there are."""
    if torch.device(device).type == "cuda":
        return world_size > torch.cuda.device_count()
    return world_size * threads > len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else False


def run_ranks(
    body: str,
    request: dict[str, Any],
    *,
    world_size: int,
    device: str,
    timeout_s: float,
    threads: int = 1,
    hang_s: float = HANG_S,
    private_network: bool = False,
) -> list[Any]:
    """Call a function in `world_size` processes.

    Args:
        body: `package.module:function`; it takes the request.
        request: JSON types.
        world_size: How many ranks.
        device: `cpu` (gloo) or `cuda` (NCCL, one GPU each).
        timeout_s: All of it may take this long.
        threads: Of each rank, on a CPU.
        hang_s: A rank may wait this long for another.
        private_network: Whether the ranks get a network of their own, where the system allows it.

    Returns:
        What each rank answered, in order.

    Raises:
        RankFailed: One raised, died or hung.
        Unsupported: More ranks than GPUs.
    """
    check_ranks(device, world_size)
    with tempfile.TemporaryDirectory(prefix="nanolib-ranks-") as name:
        folder = Path(name)
        asked = {"body": body, "request": request, "device": device, "threads": threads}
        asked["hang_s"] = min(hang_s, timeout_s)
        (folder / "request.json").write_text(json.dumps(asked))
        command = [
            *(sys.executable, "-m", launch.__name__),
            *([launch.PRIVATE_NETWORK] if private_network else []),
            *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(world_size)),
            *("-m", "nanolib.experiments.rank", str(folder)),
        ]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "PYTHONWARNINGS": "ignore",
        }
        late = False
        with (folder / "launcher.log").open("w") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                late = True
                _end_ranks(folder)
            finally:
                _kill_tree(process)
        answers = [folder / f"{rank}.json" for rank in range(world_size)]
        if all(
            answer.is_file() for answer in answers
        ):  # what a process group does when it is torn down changes nothing
            return [json.loads(answer.read_text()) for answer in answers]
        raise _failure(folder, world_size, timeout_s if late else None)


def measure_on_ranks(
    body: str, case: Any, params: Any, *, private_network: bool = False
) -> tuple[list[Any], tuple[Flag, ...]]:
    """What each rank of a case answers, and the flags of all its rows.

    Args:
        body: As in `run_ranks`; `asked_case` reads the request.
        case: Has `world_size` and `threads`.
        params: Of the distributed notebook.
        private_network: As in `run_ranks`.
    """
    answers = run_ranks(
        body,
        case.factors | {"seed": params.seed, "budget_s": params.budget_s},
        world_size=case.world_size,
        device=case.device,
        timeout_s=0.9 * params.case_timeout_s,  # so that it is told which rank was late, and not only that the case was
        threads=case.threads,
        hang_s=params.hang_s,
        private_network=private_network,
    )
    crowded = oversubscribed(case.device, case.world_size, case.threads)
    return answers, (Flag.OVERSUBSCRIBED,) if crowded else ()


def asked_case(kind: Callable[..., CaseT], asked: dict[str, Any]) -> tuple[CaseT, int, float, torch.device]:
    """On a rank, what `measure_on_ranks` asked for: the case, the seed, the budget (s), and this rank's device."""
    factors = {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}
    seed, budget_s = factors.pop("seed"), factors.pop("budget_s")
    return kind(**factors), seed, budget_s, torch.device(asked["device"].split(":")[0])


def _end_ranks(folder: Path) -> None:
    """Have the ranks write where they are, and end."""
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + _GRACE_S
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    """The launcher and all that it started, which have sessions of their own."""
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        process.kill()
        process.wait()


def _failure(folder: Path, world_size: int, late_s: float | None) -> RankFailed:
    """Whose fault it was: who raised first; if that was only waiting for another, the one that was waited for."""
    raised = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime_ns)
    first = json.loads(raised[0].read_text()) if raised else None
    if first and not first["waiting"]:
        message = f"rank {first['rank']} of {world_size} raised {first['message']}"
        return RankFailed(message, first["rank"], first["traceback"])
    log = (folder / "launcher.log").read_text(errors="replace")
    died = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-\d+)", log, re.DOTALL)
    if died and -int(died[2]) != signal.SIGTERM and late_s is None:
        rank, number = int(died[1]), -int(died[2])
        return RankFailed(f"rank {rank} of {world_size} was killed by {signal.Signals(number).name}", rank, "")
    for rank in range(world_size):
        stack = folder / f"{rank}.stack"
        if not (folder / f"{rank}.json").is_file() and not (folder / f"{rank}.error").is_file() and stack.is_file():
            text = stack.read_text(errors="replace")
            said = "let the others wait until they gave up" if late_s is None else f"did not end within {late_s:g} s"
            return RankFailed(f"rank {rank} of {world_size} {said}: {_innermost(text)}", rank, text)
    if first:
        message = f"rank {first['rank']} of {world_size} raised {first['message']}"
        return RankFailed(message, first["rank"], first["traceback"])
    lines = [line for line in log.splitlines() if line.strip() and "*****" not in line]
    return RankFailed(f"no rank started: {lines[-1] if lines else 'the launcher said nothing'}", -1, log)


def _innermost(stack: str) -> str:
    """`function (file:line)` of the first frame that faulthandler wrote, without its folder."""
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    return f"it was in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else "where it was is not known"
