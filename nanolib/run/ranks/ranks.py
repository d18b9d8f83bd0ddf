"""Several processes at work on one case: started by a launcher, ended with the case whatever happens, answers as files.

    answers = run_ranks(rank, {"seq_len": 4096}, world_size=2, device="cpu", timeout_s=60)

Each rank calls the function with the request, inside a process group of its own, and its answer (JSON types) comes back in order
of rank. A rank that raises, dies or hangs ends them all, and its traceback is what the case says.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from nanolib.measurement import Flag, Unsupported
from nanolib.meters.limits import usable_cores
from nanolib.run.case import Case
from nanolib.run.process import end_tree, signal_name
from nanolib.run.ranks import launcher
from nanolib.run.ranks.nodes import Launch, ask
from nanolib.scratch import Scratch

Body = Callable[[dict[str, Any]], Any]

CaseT = TypeVar("CaseT")

HANG_S = 60.0  # a rank that lets the others wait this long hangs
_POLL_S = 0.05


class RankFailed(Exception):
    """A rank raised, died or hung.

    Attributes:
        details: Which, and its traceback; for the details of the case's row.
    """

    def __init__(self, message: str, rank: int, traceback: str) -> None:
        self.details = {"rank": rank, "traceback": traceback}
        super().__init__(message)


@dataclass(frozen=True)
class RanksCase(Case):
    """A case on so many ranks.

    Attributes:
        nodes: Machines over which they are spread evenly; of one, the factors say nothing.
    """

    interleaves: ClassVar[bool] = False

    nodes: int = field(default=1, kw_only=True)

    @property
    def factors(self) -> dict[str, Any]:
        """Name → value of what defines the case."""
        return {name: value for name, value in super().factors.items() if (name, value) != ("nodes", 1)}

    def unsupported(self) -> str:
        """Why this machine has not enough devices."""
        return lacking(self.device, self.world_size // self.nodes)

    @property
    def devices(self) -> tuple[str, ...]:
        """A GPU per rank here; ranks on a CPU share it."""
        if not self.device.startswith("cuda"):
            return (self.device,)
        ranks = min(self.world_size // self.nodes, torch.cuda.device_count())
        return tuple(f"cuda:{rank}" for rank in range(ranks))

    @property
    def sharing(self) -> int:
        """Ranks in the memory of one device: all of a machine in that of its host, and one on each GPU."""
        return 1 if self.device.startswith("cuda") else self.world_size // self.nodes

    @property
    def ranks(self) -> str:
        """How many, and over how many machines."""
        return f"{self.world_size} rank(s)" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


def lacking(device: str, world_size: int) -> str:
    """Why this machine cannot hold so many ranks: NCCL refuses to share a GPU, and ranks on a CPU share its cores."""
    kind = torch.device(device).type
    if kind == "cuda" and world_size > torch.cuda.device_count():
        return f"{world_size} ranks need as many GPUs, and {torch.cuda.device_count()} are here; give fewer ranks"
    if kind not in ("cpu", "cuda"):
        return f"torch.distributed has no backend for {kind}; give device cpu or cuda"
    return ""


def oversubscribed(device: str, world_size: int, threads: int) -> bool:
    """Whether the ranks together want more cores, or GPUs, than there are."""
    if torch.device(device).type == "cuda":
        return world_size > torch.cuda.device_count()
    return world_size * threads > usable_cores()


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
    nodes: int = 1,
    rendezvous: str = "",
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
        private_network: Whether the ranks get a network of their own, where the system allows it and all are on this machine.
        nodes: Machines, this one among them, over which the ranks are spread evenly.
        rendezvous: `HOST:PORT` of this machine, at which the others have joined (`nano join`).

    Returns:
        What each rank answered, in order.

    Raises:
        NodesMissing: The other nodes did not come.
        RankFailed: One raised, died or hung.
        Unsupported: More ranks than GPUs.
    """
    here = world_size // nodes
    if reason := lacking(device, here):
        raise Unsupported(reason)
    asked = {
        "body": f"{body.__module__}:{body.__qualname__}",
        "request": request,
        "device": device,
        "threads": threads,
        "hang_s": min(hang_s, timeout_s),
    }
    deadline = time.monotonic() + timeout_s
    with Scratch("ranks") as scratch:
        folder = scratch.path
        if nodes == 1:
            launch, process = None, launcher.start(folder, asked, ranks=here, private_network=private_network)
        else:
            launch = ask(rendezvous, asked, nodes=nodes, ranks=here, within_s=asked["hang_s"])
            process = launcher.start(folder, launch.asked, ranks=here, nodes=nodes, interface=launch.interface)
        try:
            late = _await(process, launch, deadline)
            if (code := process.poll()) is None:
                launcher.end_ranks(process)
        finally:
            end_tree(process)
        lost = launch.collect(folder) if launch else 0
        answers = [folder / f"{rank}.json" for rank in range(world_size)]
        # What a process group does when it is torn down changes nothing.
        if all(answer.is_file() for answer in answers):
            return [json.loads(answer.read_text()) for answer in answers]
        raise _failure(folder, world_size, timeout_s if late else None, lost, code or 0)


def _await(process: subprocess.Popen[bytes], launch: Launch | None, deadline: float) -> bool:
    """Wait for this node's ranks, and a little for them once those of another node have ended; whether they are late."""
    while process.poll() is None and time.monotonic() < deadline:
        if launch and launch.others_ended():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(launcher.GRACE_S)
            return False
        time.sleep(_POLL_S)
    return process.poll() is None


def measure_on_ranks(
    body: Body, case: RanksCase, params: Any, *, private_network: bool = False, more: Mapping[str, Any] | None = None
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
        timeout_s=0.9 * params.case_timeout_s,  # so that it is told which rank was late, and not only that the case was
        threads=case.threads,
        hang_s=params.hang_s,
        private_network=private_network,
        nodes=case.nodes,
        rendezvous=params.rendezvous,
    )
    crowded = oversubscribed(case.device, case.world_size // case.nodes, case.threads)
    return answers, (Flag.OVERSUBSCRIBED,) if crowded else ()


def asked_case(kind: Callable[..., CaseT], asked: dict[str, Any]) -> tuple[CaseT, int, float, torch.device]:
    """On a rank, what `measure_on_ranks` asked for: the case, the seed, the budget (s), and this rank's device."""
    factors = {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}
    seed, budget_s = factors.pop("seed"), factors.pop("budget_s")
    return kind(**factors), seed, budget_s, torch.device(asked["device"].split(":")[0])


def _failure(folder: Path, world_size: int, late_s: float | None, lost: int, code: int = 0) -> RankFailed:
    """Whose fault it was: who raised first; if that was only waiting for another, the one that was waited for."""
    raised = [
        json.loads(file.read_text()) for file in sorted(folder.glob("*.error"), key=lambda f: f.stat().st_mtime_ns)
    ]
    first = next((error for error in raised if not error["waiting"]), raised[0] if raised else None)
    if first:
        said = f"rank {first['rank']} of {world_size} raised {first['message']}"
        raising = RankFailed(said, first["rank"], first["traceback"])
        if not first["waiting"]:
            return raising
    if code < 0:
        return RankFailed(f"the launcher of the ranks was killed by {signal_name(-code)}", -1, "")
    log = (folder / launcher.LOG).read_text(errors="replace")
    ended = ((int(file.stem), -int(file.read_text())) for file in sorted(folder.glob("*.ended")))
    # NCCL does not raise where another rank has not come: its watchdog writes so, and aborts the process that waited.
    waited = {int(rank) for rank in re.findall(r"\[Rank (\d+)\].*Watchdog caught collective operation timeout", log)}
    died = [(rank, number) for rank, number in ended if number > 0 and number != signal.SIGTERM and rank not in waited]
    if died and late_s is None:
        rank, number = died[0]
        return RankFailed(f"rank {rank} of {world_size} was killed by {signal_name(number)}", rank, "")
    if lost:
        return RankFailed(f"{lost} of the other nodes is gone, with its ranks; start nano join there again", -1, log)
    for rank in range(world_size):
        stack = folder / f"{rank}.stack"
        told = any((folder / f"{rank}.{end}").is_file() for end in ("json", "error"))
        if not told and rank not in waited and stack.is_file():
            text = stack.read_text(errors="replace")
            said = "let the others wait until they gave up" if late_s is None else f"did not end within {late_s:g} s"
            return RankFailed(f"rank {rank} of {world_size} {said}: {_innermost(text)}", rank, text)
    if first:
        return raising
    lines = [line for line in log.splitlines() if line.strip() and "*****" not in line]
    within = "" if late_s is None else f" within {late_s:g} s"
    return RankFailed(f"no rank started{within}: {lines[-1] if lines else 'the launcher said nothing'}", -1, log)


def _innermost(stack: str) -> str:
    """`function (file:line)` of the first frame that faulthandler wrote, without its folder."""
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    return f"it was in {frame[3]} ({Path(frame[1]).name}:{frame[2]})" if frame else "where it was is not known"
