"""Define the base classes of all cases, and make the rows that several experiments use.

A case is one combination of factors, such as a sequence length and a dtype. A case can predict its
results, plan its memory, and measure itself.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from nanolib.measurement import Flag, Measurement, Unsupported
from nanolib.meters.call_check import CallCheck
from nanolib.meters.machine import usable_cores
from nanolib.meters.recording import Trace
from nanolib.meters.sampler import Timing
from nanolib.numbers import MIB
from nanolib.run.ranks import Message, run_ranks
from nanolib.stats.intervals import Interval, mean_interval

# Name of a peak rate → measured rate with its interval, FLOP/s or B/s, for `roofline_ms`.
Ceilings = dict[str, Interval]
Predicted = dict[str, float | str]  # Name of a metric → predicted value.
# The generator yields rows, timings and a trace, and receives the rows of each timing by scope.
Measuring = Generator[Measurement | Timing | Trace, dict[str, Measurement] | None, None]


@dataclass(frozen=True)
class Plan:
    """The memory that a case will need.

    Attributes:
        peaks: Scope → peak of the live bytes.
        reason: Reason why no peak is known, in one line. An unsupported case has an empty reason.
        unsupported_reason: Reason, found during planning, why the case cannot run on this machine.
    """

    peaks: dict[str, int] = field(default_factory=dict)
    reason: str = ""
    unsupported_reason: str = ""

    @property
    def most(self) -> int | None:
        """The largest peak of all scopes, in bytes, or None if no peak is known."""
        return max(self.peaks.values(), default=None)


@dataclass(frozen=True)
class Case:
    """One combination of factors. Each field is a factor with a value of a JSON type.

    Each class gives its cases a short text for progress bars and tables.

    Attributes:
        supports_ab: Whether `nano ab` can time the case in turns in two versions of the code.
        VARIES: Factors in which the cases of a group differ, the name of the case first.
        device: Device on which the case runs.
    """

    supports_ab: ClassVar[bool] = True
    VARIES: ClassVar[tuple[str, ...]] = ()

    device: str

    def unsupported_reason(self) -> str:
        """Return why this machine cannot run the case, or an empty string if no reason is known."""
        return ""

    def plan(self) -> Plan:
        """Plan the memory of the case without running it."""
        return Plan()

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the predictions of formulas, and the planned peak memory in MiB.

        Args:
            ceilings: Peak rates, as for `roofline_ms`. Without peak rates, no time is predicted.
        """
        predicted = self.formulas(ceilings)
        if predicted and (planned := self.plan().most) is not None:
            predicted["peak_memory"] = planned / MIB
        return predicted

    def formulas(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the predictions of formulas by name, or nothing if no formula applies."""
        return {}

    def measure(self, params, ceilings: Ceilings) -> Measuring:
        """Yield the rows of the case, and a `Timing` for each latency that its group compares.

        After each `Timing`, the generator receives the rows of the timing by scope. A case with
        power samples or times of layers also yields a `Trace`. The case yields it before the first
        reading, so that nanolib stores the rows of a failed case too.

        Args:
            params: Parameters of the notebook.
            ceilings: Peak rates that this run has measured, as for `roofline_ms`.
        """
        raise NotImplementedError

    @property
    def group(self) -> str:
        """The name of the group whose cases nanolib times in turns, or an empty string.

        The name contains all factors that do not differ within the group.
        """
        shared = (str(value) for name, value in self.factors.items() if name not in self.VARIES)
        return " ".join(shared) if self.VARIES else ""

    @property
    def inputs_id(self) -> str:
        """A text that is equal for cases of a group that share their inputs in memory."""
        return self.case_id

    @property
    def title(self) -> str:
        """The name of this case as the baseline in speed-up rows of other cases."""
        return str(getattr(self, self.VARIES[0]))

    @property
    def is_baseline(self) -> bool:
        """Whether nanolib computes speed-ups of the group's other cases over this case."""
        return False

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that a run locks for the case."""
        return (self.device,)

    @property
    def runs_code(self) -> bool:
        """Whether the model is a user's own code. Only a run may execute such code."""
        return False

    @property
    def factors(self) -> dict[str, Any]:
        """The factors that define the case, as stored: name → value."""
        return asdict(self)

    @property
    def case_id(self) -> str:
        """Sixteen hexadecimal digits that depend only on the case's class and factors."""
        text = json.dumps([type(self).__name__, self.factors], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class RanksCase(Case):
    """A case that runs on one or more ranks, and has fields `world_size` and `threads`.

    If the case has a group, nanolib calls `launch(cases, params)` instead of `measure`. The method
    measures `cases`, the cases of the group that can run, in one launch of the ranks. The method
    yields pairs of a case and its row.

    Attributes:
        nodes: Number of machines. The factors omit `nodes` on a single machine.
    """

    supports_ab: ClassVar[bool] = False

    nodes: int = field(default=1, kw_only=True)

    @property
    def factors(self) -> dict[str, Any]:
        """The factors that define the case: name → value."""
        factors = super().factors
        if self.nodes == 1:
            del factors["nodes"]
        return factors

    @property
    def ranks_here(self) -> int:
        """The largest number of ranks on one machine."""
        return math.ceil(self.world_size / self.nodes)

    @property
    def devices(self) -> tuple[str, ...]:
        """The GPUs of the ranks on this machine, or the CPU that the ranks share."""
        if not self.device.startswith("cuda"):
            return (self.device,)
        return tuple(f"cuda:{n}" for n in range(min(self.ranks_here, torch.cuda.device_count())))

    @property
    def sharing(self) -> int:
        """The number of ranks that share one memory. On a GPU, each rank has its own memory."""
        return 1 if self.device.startswith("cuda") else self.ranks_here

    @property
    def ranks(self) -> str:
        """The number of ranks and machines, as text."""
        return f"{self.world_size} rank(s)" + (f" on {self.nodes} nodes" if self.nodes > 1 else "")

    @property
    def is_oversubscribed(self) -> bool:
        """Whether the ranks on a CPU need more cores than this machine has.

        On GPUs, a case runs only if each rank has its own GPU.
        """
        is_on_cpu = not self.device.startswith("cuda")
        return is_on_cpu and self.ranks_here * self.threads > usable_cores()


def measure_on_ranks(
    body: Callable[[Message], Any], cases: Sequence[RanksCase], params
) -> tuple[list[Any], tuple[Flag, ...]]:
    """Run cases on the same ranks, and return each rank's result and the flags of all rows.

    Args:
        body: Function that each rank calls, as for `run_ranks`. Its request has the factors of the
            `cases`, the `seed`, and the time budget `budget_s`, s.
        cases: Cases to measure, with the same number of ranks and threads.
        params: Parameters of the distributed notebook.
    """
    case = cases[0]
    answers = run_ranks(
        body,
        {
            "cases": [case.factors for case in cases],
            "seed": params.seed,
            "budget_s": params.budget_s,
        },
        world_size=case.world_size,
        device=case.device,
        # The ranks end before the case's own limit, so that the error can name the slow rank.
        timeout_s=0.9 * params.case_timeout_s,
        threads=case.threads,
        rank_timeout_s=params.rank_timeout_s,
        private_network=params.private_network,
    )
    return answers, (Flag.OVERSUBSCRIBED,) if case.is_oversubscribed else ()


def timed_call_ms(call: Callable[[], object]) -> float:
    """Return the time of one call, in ms. The time of a first call includes compilation.

    Raises:
        Unsupported: The call returns before its work ends.
    """
    checked, start = CallCheck(call, "call", Unsupported), time.perf_counter()
    checked()
    return (time.perf_counter() - start) * 1e3


def compile_row(first_ms: float, later_ms: float) -> Measurement:
    """Return the row of the compile time: the first call's time minus a later call's time."""
    return Measurement(
        "latency",
        max(0.0, first_ms - later_ms),
        n=1,
        method="first call minus a later call",
        scope="compile",
    )


def over_seeds(
    metric: str, values: Sequence[float], scope: str = "", paired: bool = False, **rest
) -> Measurement:
    """Return the row of the mean over seeds, with Student's interval.

    Args:
        metric: Metric of the row, a key of `METRICS`.
        values: One value per seed, shape [seeds], for at least two seeds.
        scope: Scope of the row.
        paired: Whether each value is the difference between two runs of one seed.
        rest: More fields of the row.
    """
    low, mean, high = mean_interval(values)
    method = "paired by seed, Student's interval" if paired else "mean over seeds"
    samples = tuple(values)
    return Measurement(
        metric, mean, low, high, 0.95, len(samples), samples, method=method, scope=scope, **rest
    )
