"""Several processes at work on one case, on this machine: they end with the case whatever happens.

    answers = run_ranks(rank, {"seq_len": 4096}, world_size=2, device="cpu", timeout_s=60)

Each rank calls the function with the request, inside a process group of its own, and its answer (JSON types) comes back in order
of rank. A rank that raises, dies or hangs ends them all, and its traceback is what the case says. Ranks are started by
`torch.multiprocessing` from one process, so that they can share a network of their own, and on a CPU one import of torch. Under
torchrun (`nanolib.run.torchrun`) its processes are the ranks.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.multiprocessing

from nanolib.measurement import Flag, Unsupported
from nanolib.meters.limits import usable_cores
from nanolib.run.case import Case
from nanolib.run.process import describe_exit, kill_tree, spawn
from nanolib.run.rank import GRACE_S, RankFailed, failure, launch

Body = Callable[[dict[str, Any]], Any]

CaseT = TypeVar("CaseT")

HANG_S = 60.0  # a rank that lets the others wait this long hangs
_START_S = 60.0  # for importing torch on a busy machine
_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


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
        process, ended = spawn(f"{launch.__module__}:launch", *given, environment=variables)
        late, first = False, None
        try:
            if ended.poll(timeout_s + _START_S):
                late, first = ended.recv()
        except EOFError:  # it has ended without a word: its exit code tells, or its log
            process.join(GRACE_S)
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
        raise failure(folder, world_size, timeout_s if late else None, first)
