"""Define the base classes of each notebook's parameters and cases.

The parameters of a notebook give its cases. A case is one combination of factors, such as a
sequence length and a dtype. A case can predict its results, plan its memory, and measure itself.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic

from nanolib.config import ATTENTION_KINDS, DTYPES, PRESETS
from nanolib.measurement import MOST_LABEL, Measurement, quote
from nanolib.meters.machine import resolve_device
from nanolib.meters.recording import Trace
from nanolib.meters.sampler import Collect, Timing
from nanolib.numbers import MIB
from nanolib.params import StrictModel
from nanolib.stats.intervals import Interval, mean_interval

Length = Annotated[int, pydantic.Field(gt=0, le=2**24)]
Batch = Annotated[int, pydantic.Field(gt=0, le=65_536)]
# The number of heads, layers or threads, or the dimension of a head.
Count = Annotated[int, pydantic.Field(gt=0, le=4096)]
Steps = Annotated[int, pydantic.Field(gt=0, le=1_000_000)]
_Value = TypeVar("_Value")
# A list of values. Each value gives one or more cases.
Grid = Annotated[list[_Value], pydantic.Field(min_length=1, max_length=64)]
Preset = Literal[tuple(PRESETS)]
Kind = Literal[tuple(ATTENTION_KINDS)]
Dtypes = Grid[Literal[DTYPES]]


class Params(StrictModel):
    """Parameters of every measuring notebook.

    Attributes:
        device: Device to measure: `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`.
        rel_ci: Stop timing when the interval's half-width is at most this share of the estimate.
        budget_s: Longest time of one timing, s.
        case_timeout_s: Longest time of one case, s.
        isolation: Use `process` to run each case in a fresh process, otherwise `none`.
        seed: Seed of the random inputs.
        trace: Whether to write a Chrome trace of each case into the folder `traces`.
        suite: Name of the parameter set.
        label: Your name for the run.
        resume: Continue the last run with the same parameters, version and machine.
    """

    device: str = "auto"
    rel_ci: float = pydantic.Field(0.01, gt=0, lt=1)
    budget_s: float = pydantic.Field(0.3, gt=0, le=86_400)
    case_timeout_s: float = pydantic.Field(300.0, gt=0, le=604_800)
    isolation: Literal["none", "process"] = "none"
    seed: int = pydantic.Field(0, ge=0, lt=2**31)
    trace: bool = False
    suite: str = pydantic.Field("", max_length=MOST_LABEL)
    # papermill passes a label of digits as a number.
    label: str = pydantic.Field("", max_length=MOST_LABEL, coerce_numbers_to_str=True)
    resume: bool = False
    _collect: Collect | None = pydantic.PrivateAttr(None)

    @pydantic.field_validator("*")
    @classmethod
    def _fold(cls, value):
        # A repeated value would give the same case again.
        if not isinstance(value, list):
            return value
        return [item for index, item in enumerate(value) if item not in value[:index]]

    @pydantic.field_validator("device")
    @classmethod
    def _device_is_here(cls, value: str) -> str:
        resolve_device(value)
        return value

    @pydantic.field_validator("label")
    @classmethod
    def _label_is_a_name(cls, value: str) -> str:
        is_taken = value in ("all", "latest", "newest") or value.startswith("latest~")
        if is_taken or not value.isprintable():
            raise ValueError(
                f"{quote(value)} cannot name a run; "
                "use other printable text than all, newest, latest or latest~1"
            )
        return value

    def look(self, cases: Sequence[Any]) -> None:
        """Run the user's code once for all cases, on tensors without data.

        Raises:
            BadInput: The code that a parameter names does not exist.
        """

    def timing(self, device: str, phases: Mapping[str, Callable[[], object]], **changes) -> Timing:
        """Make the `Timing` of some calls, such as the one that a case yields.

        Args:
            device: Device on which the calls compute.
            phases: Name of each scope → function to time.
            changes: Other values of the fields of `Timing`.
        """
        settings = {"rel_ci": self.rel_ci, "budget_s": self.budget_s, "collect": self._collect}
        return Timing(phases, device=device, **settings | changes)

    def with_collector(self, collect: Collect) -> Self:
        """Return a copy of the parameters. Timings with this copy call `collect` for blocks."""
        copy = self.model_copy()
        copy._collect = collect
        return copy

    def defining(self) -> dict[str, Any]:
        """Return the parameters that define what a run measures, for the run's fingerprint.

        `--resume` continues a run even if the values of the other parameters differ.
        """
        return self.model_dump(mode="json", exclude={"suite", "label", "resume", "trace"})


def check_heads(params):
    """Return `params` if `num_kv_heads` divides `num_heads`. 0 means `num_heads`."""
    heads, kv_heads = params.num_heads, params.num_kv_heads
    if kv_heads and heads % kv_heads:
        raise ValueError(
            f"num_kv_heads: {kv_heads} does not divide num_heads {heads}; choose a divisor"
        )
    return params


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
