"""A case: one point of a grid that predicts itself, plans its memory, and measures itself.

A `RanksCase` runs on several ranks. Several kinds of cases make the rows at the end.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import torch

from nanolib.measurement import Flag, Measurement, Unsupported
from nanolib.meters.machine import usable_cores
from nanolib.meters.memory import MIB
from nanolib.meters.time.call_check import CallCheck
from nanolib.meters.time.sampler import Timing
from nanolib.run.ranks import lacking, run_ranks
from nanolib.stats.intervals import mean_interval

# Yields rows and requests for timings; each request is answered with the timing's rows by scope.
Measuring = Generator[Measurement | Timing, dict[str, Measurement] | None, None]


@dataclass(frozen=True)
class Plan:
    """The memory that a case will need.

    Attributes:
        peaks: Scope → peak live bytes.
        reason: Why there are none, in one line.
        unsupported: Why the case cannot run at all, if building it shows that.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    unsupported: str = ""

    @property
    def most(self) -> int | None:
        """The largest peak of all scopes, bytes; None without a plan."""
        return max(self.peaks.values(), default=None)


@dataclass(frozen=True)
class Case:
    """One point of the grid; its fields are the factors, JSON types only.

    Attributes:
        supports_ab: Whether `nano ab` can interleave its timings with another version's.
        device: Where it runs.
    """

    supports_ab: ClassVar[bool] = True

    device: str

    def unsupported(self) -> str:
        """Return why this machine cannot run it; empty if no reason is known before a run."""
        return ""

    def plan(self) -> Plan:
        """Return the memory that it will need, without running it."""
        return Plan()

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Return what formulas predict, and after `bytes` the planned `peak_memory` (MiB).

        Args:
            ceilings: As `roofline_ms` takes them; without them no time is predicted.
        """
        predicted: dict[str, float | str] = {}
        for name, value in self.formulas(ceilings).items():
            predicted[name] = value
            if name == "bytes" and (planned := self.plan().most) is not None:
                predicted["peak_memory"] = planned / MIB
        return predicted

    def formulas(self, ceilings: dict[str, float] | None = None) -> dict[str, Any]:
        """Return what formulas predict; empty if none applies."""
        return {}

    def measure(self, params: Any, ceilings: dict[str, float]) -> Measuring:
        """Measure it, row by row.

        The case yields a `Timing` for each latency that is ranked with those of other cases, and
        receives its rows by scope.

        Args:
            params: Those of its notebook.
            ceilings: The peak rates that this run has measured, as `roofline_ms` takes them.
        """
        raise NotImplementedError

    @property
    def group(self) -> str:
        """The group whose latencies are ranked and so timed in turns; empty for none."""
        return ""

    @property
    def title(self) -> str:
        """Its name in the rows of other cases of the group."""
        return str(self)

    @property
    def is_baseline(self) -> bool:
        """Whether the other cases of its group are compared with it."""
        return False

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that it needs for itself."""
        return (self.device,)

    @property
    def runs_code(self) -> bool:
        """Whether building it runs code of the user's, which only a run may do."""
        return False

    @property
    def factors(self) -> dict[str, Any]:
        """Name → value of what defines the case, as stored."""
        return asdict(self)

    @property
    def case_id(self) -> str:
        """Sixteen hexadecimal digits that depend only on the case's class and factors."""
        text = json.dumps([type(self).__name__, self.factors], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        """The factors that a progress bar shows."""
        shown = (getattr(self, f.name) for f in fields(self) if f.name != "device")
        return " ".join(_brief(value) for value in shown if value not in ({}, "", None))


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return str(value)


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


def oversubscribed(device: str, ranks: int, threads: int) -> bool:
    """Return whether the ranks of a machine want more cores, or GPUs, than there are."""
    if torch.device(device).type == "cuda":
        return ranks > torch.cuda.device_count()
    return ranks * threads > usable_cores()


def measure_on_ranks(
    body: Callable[[dict[str, Any]], Any], case: RanksCase, params: Any, **more: Any
) -> tuple[list[Any], tuple[Flag, ...]]:
    """Return what each rank of a case answers, and the flags of all its rows.

    Args:
        body: As in `run_ranks`; `asked_case` reads the request.
        case: What is measured.
        params: Of the distributed notebook.
        more: JSON types for the request, which the body takes out of it.
    """
    answers = run_ranks(
        body,
        case.factors | {"seed": params.seed, "budget_s": params.budget_s} | more,
        world_size=case.world_size,
        device=case.device,
        timeout_s=0.9 * params.case_timeout_s,  # so that the rank that was late can be named
        threads=case.threads,
        rank_timeout_s=params.rank_timeout_s,
        private_network=params.private_network,
    )
    crowded = oversubscribed(case.device, case.ranks_here, case.threads)
    return answers, (Flag.OVERSUBSCRIBED,) if crowded else ()


def asked_case(
    kind: Callable[..., RanksCase], asked: dict[str, Any]
) -> tuple[Any, int, float, torch.device]:
    """Return, on a rank, the case of a request, the seed, the budget (s) and the rank's device."""
    factors = {
        name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()
    }
    seed, budget_s = factors.pop("seed"), factors.pop("budget_s")
    return kind(**factors), seed, budget_s, torch.device(asked["device"].split(":")[0])


def timed_call_ms(call: Callable[[], object]) -> float:
    """Time one call, ms, compiling included if it is the first.

    Raises:
        Unsupported: The call only begins its work, or torch gives up compiling it.
    """
    checked, start = CallCheck(call, "call", Unsupported), time.perf_counter()
    checked()
    return (time.perf_counter() - start) * 1e3


def compile_row(first_ms: float, later_ms: float) -> Measurement:
    """Return the time of compiling."""
    compile_ms, method = max(0.0, first_ms - later_ms), "first call less a later one"
    return Measurement("latency", compile_ms, n=1, method=method, scope="compile")


def over_seeds(
    metric: str, values: Sequence[float], scope: str = "", paired: bool = False, **rest: Any
) -> Measurement:
    """Return the mean over seeds, with Student's interval.

    Args:
        metric: What the values are.
        values: One per seed, at least two.
        scope: Of what.
        paired: Whether each is a difference between two runs of one seed.
        rest: More of the row.
    """
    low, mean, high = mean_interval(values)
    method = "paired by seed, Student's interval" if paired else "mean over seeds"
    rest = {"method": method, "scope": scope, "n": len(values), "samples": tuple(values)} | rest
    return Measurement(metric, mean, low, high, 0.95, **rest)
