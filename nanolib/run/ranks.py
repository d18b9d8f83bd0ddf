"""Several processes at work on one case, on this machine: they end with the case whatever happens.

    answers = run_ranks(rank, {"seq_len": 4096}, world_size=2, device="cpu", timeout_s=60)

Each rank calls the function with the request, inside a process group of its own, and its answer (JSON types) comes back in order
of rank. A rank that raises, dies or hangs ends them all, and its traceback is what the case says. Ranks are started by
`torch.multiprocessing` from one process, so that they can share a network of their own, and on a CPU one import of torch. Under
torchrun (`nanolib.run.torchrun`) its processes are the ranks.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

from nanolib.measurement import Flag, Unsupported
from nanolib.meters.limits import usable_cores
from nanolib.meters.links import enter_private_network
from nanolib.run.case import Case
from nanolib.run.process import describe_exit, exit_with_parent, kill_tree, signal_name, spawn

Body = Callable[[dict[str, Any]], Any]

CaseT = TypeVar("CaseT")

HANG_S = 60.0  # a rank that lets the others wait this long hangs
_GRACE_S = 2.0  # for writing where it is, when a rank is told to end
_START_S = 60.0  # for importing torch on a busy machine
_LOG = "log"
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}
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


class Launched(Protocol):
    """Ranks that somebody else has started; see `nanolib.run.torchrun`."""

    world_size: int
    ranks_per_node: int

    def run(self, asked: dict[str, Any]) -> list[Any]:
        """What each rank answers."""
        ...


_launched: list[Launched] = []  # at most one


def use(launched: Launched) -> None:
    """Run all cases of this process on ranks that somebody else has started."""
    _launched[:] = [launched]


def nodes_of(world_size: int) -> int:
    """Over how many machines so many ranks lie."""
    return max((math.ceil(world_size / each.ranks_per_node) for each in _launched), default=1)


@dataclass(frozen=True)
class RanksCase(Case):
    """A case on so many ranks.

    Attributes:
        nodes: Machines over which they are spread; of one, the factors say nothing.
    """

    interleaves: ClassVar[bool] = False

    nodes: int = field(default=1, kw_only=True)

    @property
    def factors(self) -> dict[str, Any]:
        """Name → value of what defines the case."""
        return {
            name: value for name, value in super().factors.items() if (name, value) != ("nodes", 1)
        }

    def unsupported(self) -> str:
        """Why there are not enough devices, or ranks."""
        return lacking(self.device, self.world_size)

    @property
    def devices(self) -> tuple[str, ...]:
        """A GPU per rank here; ranks on a CPU share it."""
        if not self.device.startswith("cuda"):
            return (self.device,)
        ranks = min(math.ceil(self.world_size / self.nodes), torch.cuda.device_count())
        return tuple(f"cuda:{rank}" for rank in range(ranks))

    @property
    def sharing(self) -> int:
        """Ranks in the memory of one device: all of a machine in that of its host, and one on each GPU."""
        return 1 if self.device.startswith("cuda") else math.ceil(self.world_size / self.nodes)

    @property
    def ranks(self) -> str:
        """How many, and over how many machines."""
        return f"{self.world_size} rank(s)" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


def lacking(device: str, world_size: int) -> str:
    """Why so many ranks cannot run: NCCL refuses to share a GPU, and ranks on a CPU share its cores."""
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        return f"torch.distributed has no backend for {kind}; give device cpu or cuda"
    for launched in _launched:
        if world_size > launched.world_size:
            return f"{world_size} ranks are more than the {launched.world_size} that torchrun has started; give fewer"
    here = math.ceil(world_size / nodes_of(world_size))
    if kind == "cuda" and here > torch.cuda.device_count():
        return f"{here} ranks need as many GPUs, and {torch.cuda.device_count()} are here; give fewer ranks"
    return ""


def oversubscribed(device: str, ranks: int, threads: int) -> bool:
    """Whether the ranks of a machine together want more cores, or GPUs, than there are."""
    if torch.device(device).type == "cuda":
        return ranks > torch.cuda.device_count()
    return ranks * threads > usable_cores()


def measure_on_ranks(
    body: Body,
    case: RanksCase,
    params: Any,
    *,
    private_network: bool = False,
    more: Mapping[str, Any] | None = None,
) -> tuple[list[Any], tuple[Flag, ...]]:
    """What each rank of a case answers, and the flags of all its rows.

    Args:
        body: As in `run_ranks`; `asked_case` reads the request.
        case: What is measured.
        params: Of the distributed notebook.
        private_network: As in `run_ranks`.
        more: JSON types for the request, which the body takes out of it.
    """
    answers = run_ranks(
        body,
        case.factors | {"seed": params.seed, "budget_s": params.budget_s} | dict(more or {}),
        world_size=case.world_size,
        device=case.device,
        timeout_s=0.9
        * params.case_timeout_s,  # so that it is told which rank was late, and not only that the case was
        threads=case.threads,
        hang_s=params.hang_s,
        private_network=private_network,
    )
    crowded = oversubscribed(case.device, math.ceil(case.world_size / case.nodes), case.threads)
    return answers, (Flag.OVERSUBSCRIBED,) if crowded else ()


def asked_case(
    kind: Callable[..., CaseT], asked: dict[str, Any]
) -> tuple[CaseT, int, float, torch.device]:
    """On a rank, what `measure_on_ranks` asked for: the case, the seed, the budget (s), and this rank's device."""
    factors = {
        name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()
    }
    seed, budget_s = factors.pop("seed"), factors.pop("budget_s")
    return kind(**factors), seed, budget_s, torch.device(asked["device"].split(":")[0])


def run_ranks(
    body: Body,
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
        body: A function of a module that each rank can import; it takes the request.
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
    if reason := lacking(device, world_size):
        raise Unsupported(reason)
    asked = {
        "body": f"{body.__module__}:{body.__qualname__}",
        "request": request,
        "world_size": world_size,
        "device": device,
        "threads": threads,
        "hang_s": min(hang_s, timeout_s),
    }
    for launched in _launched:
        return launched.run(asked)
    variables = {"OMP_NUM_THREADS": str(threads)}
    if loopback := _LOOPBACK.get(
        sys.platform
    ):  # whatever the user says of other networks: none is needed
        variables |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    with TemporaryDirectory(prefix="nanolib-ranks-") as name:
        folder = Path(name)
        given = (folder, asked, timeout_s, private_network)
        process, ended = spawn(f"{__name__}:_launch", *given, environment=variables)
        late, first = False, None
        try:
            if ended.poll(timeout_s + _START_S):
                late, first = ended.recv()
        except EOFError:  # it has ended without a word: its exit code tells, or its log
            process.join(_GRACE_S)
        finally:
            code = process.exitcode or 0
            kill_tree(process.pid)
            process.join()
            ended.close()
        answers = [folder / f"{rank}.json" for rank in range(world_size)]
        if all(answer.is_file() for answer in answers):
            return [json.loads(answer.read_text()) for answer in answers]
        if code < 0:
            raise RankFailed(f"ranks: {describe_exit(code)}", -1, "")
        raise _failure(folder, world_size, timeout_s if late else None, first)


def start_method(device: str) -> str:
    """How ranks begin: CUDA does not survive a fork of who has asked for it, nor do the libraries of macOS."""
    return "fork" if sys.platform == "linux" and device == "cpu" else "spawn"


def _launch(
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
        while not context.join(0.05, _GRACE_S):
            if late := time.monotonic() > deadline:
                for process in context.processes:
                    process.terminate()
                deadline = math.inf
                break
        for process in context.processes:
            process.join(_GRACE_S)
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


def raised(errors: Iterable[Mapping[str, Any]], world_size: int) -> tuple[RankFailed, bool]:
    """The error of the rank whose fault it was, and whether that is known: of those that only waited it is not.

    Args:
        errors: As `answer` gives them, in the order in which they came; at least one.
        world_size: How many ranks there are.
    """
    error = min(errors, key=lambda error: error["waiting"])
    said = f"rank {error['rank']} of {world_size} raised {error['message']}"
    return RankFailed(said, error["rank"], error["traceback"]), not error["waiting"]


def _failure(
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


def _write(path: Path, value: Any) -> None:
    """Whole or not at all: the reader may come at any moment."""
    half = path.with_suffix(".half")
    half.write_text(json.dumps(value))
    half.replace(path)
