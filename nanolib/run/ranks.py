"""Several processes at work on one case, on this machine: they end with the case whatever happens.

    answers = run_ranks(rank, {"seq_len": 4096}, world_size=2, device="cpu", timeout_s=60)

Each rank calls the function with the request, inside a process group of its own, and its answer
(JSON types) comes back in order of rank. A rank that raises, dies or hangs ends them all, and its
traceback is what the case says. `torch.multiprocessing` starts the ranks from one process, so that
they share a network of their own and, on a CPU, one import of torch. Under torchrun
(`nanolib.run.torchrun`) its processes are the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import torch

from nanolib.measurement import Flag, Unsupported
from nanolib.meters.machine import usable_cores
from nanolib.run.case import Case
from nanolib.run.process import Died, Late, call_in_process
from nanolib.run.rank import RankFailed, failure, launch

Body = Callable[[dict[str, Any]], Any]

CaseT = TypeVar("CaseT")

HANG_S = 60.0  # a rank that lets the others wait this long hangs

_launched: list[Any] = []  # at most one


def use(launched: Any) -> None:
    """Run all cases of this process on ranks that torchrun has started; see its `Ranks`."""
    _launched[:] = [launched]


def nodes_of(world_size: int) -> int:
    """Return the number of machines of this many ranks."""
    return max((math.ceil(world_size / each.ranks_per_node) for each in _launched), default=1)


@dataclass(frozen=True)
class RanksCase(Case):
    """A case on a number of ranks.

    Attributes:
        nodes: Machines over which they are spread; of one, the factors say nothing.
    """

    supports_ab: ClassVar[bool] = False

    nodes: int = field(default=1, kw_only=True)

    @property
    def factors(self) -> dict[str, Any]:
        """Name → value of what defines the case."""
        factors = super().factors
        if self.nodes == 1:
            del factors["nodes"]
        return factors

    def unsupported(self) -> str:
        """Return why there are not enough devices, or ranks."""
        return lacking(self.device, self.world_size)

    @property
    def ranks_here(self) -> int:
        """Ranks on each machine, at most."""
        return math.ceil(self.world_size / self.nodes)

    @property
    def devices(self) -> tuple[str, ...]:
        """A GPU per rank here; ranks on a CPU share it."""
        if not self.device.startswith("cuda"):
            return (self.device,)
        return tuple(f"cuda:{n}" for n in range(min(self.ranks_here, torch.cuda.device_count())))

    @property
    def sharing(self) -> int:
        """Ranks in the memory of one device: all of a machine in its host's, one on each GPU."""
        return 1 if self.device.startswith("cuda") else self.ranks_here

    @property
    def ranks(self) -> str:
        """How many, and over how many machines."""
        return f"{self.world_size} rank(s)" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")


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


def oversubscribed(device: str, ranks: int, threads: int) -> bool:
    """Return whether the ranks of a machine want more cores, or GPUs, than there are."""
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
    """Return what each rank of a case answers, and the flags of all its rows.

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
        timeout_s=0.9 * params.case_timeout_s,  # so that the rank that was late can be named
        threads=case.threads,
        rank_timeout_s=params.rank_timeout_s,
        private_network=private_network,
    )
    crowded = oversubscribed(case.device, case.ranks_here, case.threads)
    return answers, (Flag.OVERSUBSCRIBED,) if crowded else ()


def asked_case(
    kind: Callable[..., CaseT], asked: dict[str, Any]
) -> tuple[CaseT, int, float, torch.device]:
    """Return, on a rank, the case of a request, the seed, the budget (s) and the rank's device."""
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
        What each rank answered, in order.

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
    with TemporaryDirectory(prefix="nanolib-ranks-") as name:
        given, limit_s = (Path(name), asked, timeout_s, private_network), timeout_s + 60
        try:
            results, late, first = next(call_in_process(launch, *given, limit_s=limit_s))
        except (Died, Late, StopIteration) as error:
            raise RankFailed(f"ranks: {error}") from None
        if all("answer" in result for result in results):
            return [result["answer"] for result in results]
        raise failure(results, Path(name), timeout_s if late else None, first)
