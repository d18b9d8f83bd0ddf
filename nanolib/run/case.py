"""Define the base classes of all cases, and make the rows that several experiments use.

A case is one combination of factors, such as a sequence length and a dtype. A case can predict its
results, plan its memory, and measure itself.
"""

import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from nanolib.measurement import Measurement, Unsupported
from nanolib.meters.call_check import CallCheck
from nanolib.meters.recording import Trace
from nanolib.meters.sampler import Timing
from nanolib.numbers import MIB
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
        shares_launch: Whether `launch`, not `measure`, measures the cases of a group.
        VARIES: Factors in which the cases of a group differ, the name of the case first.
        device: Device on which the case runs.
    """

    supports_ab: ClassVar[bool] = True
    shares_launch: ClassVar[bool] = False
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

    def launch(self, cases: Sequence["Case"], params) -> Iterator[tuple["Case", Measurement]]:
        """Measure cases of a group in one launch of processes, and yield each case with its rows.

        Args:
            cases: Cases of the group that can run, this case first.
            params: Parameters of the notebook.
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
