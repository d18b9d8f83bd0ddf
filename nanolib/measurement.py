"""Declare metrics, statuses, flags and provenance, and define `Measurement` for results."""

import difflib
import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from nanolib.numbers import format_with_interval


class Direction(enum.StrEnum):
    """Direction in which a metric improves. `EQUAL` means that the value must not change."""

    LOWER = "lower"
    HIGHER = "higher"
    EQUAL = "equal"


class Status(enum.StrEnum):
    """Status of a case. `STARTED` means that the case is running, or that its process died."""

    STARTED = "started"
    OK = "ok"
    OOM = "oom"
    OOM_PREDICTED = "oom_predicted"
    UNSUPPORTED = "unsupported"
    TIMEOUT = "timeout"
    ERROR = "error"


class MemoryKind(enum.StrEnum):
    """Categories of memory use, in the order of charts and tables. `GATHERED` is only for FSDP."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    SAVED = "saved activations"
    CACHE = "cache"
    INPUTS = "inputs"
    TEMPORARIES = "temporaries"
    GATHERED = "gathered weights"
    UNATTRIBUTED = "unattributed"


MOST_LABEL = 200  # Maximum length of a run's label, in characters.


class RunStatus(enum.StrEnum):
    """Status of a run. nanolib writes `DONE` last, so `DONE` means that all results are stored."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Provenance(enum.StrEnum):
    """Source of a number. Charts and sums never mix numbers of different provenance."""

    MEASURED = "measured"
    EMULATED = "emulated"
    ESTIMATED = "estimated"
    MODELLED = "modelled"
    REPLAYED = "replayed"


class Flag(enum.StrEnum):
    """A label with an explanation. nanolib shows the label next to a number."""

    def __new__(cls, name: str, text: str) -> Self:
        """Create a flag with its explanation."""
        flag = str.__new__(cls, name)
        flag._value_, flag.text = name, text
        return flag

    OUTLIERS_MILD = "outliers_mild", "outlier blocks (beyond 1.5 IQR); the estimate includes them"
    OUTLIERS_SEVERE = "outliers_severe", "outlier blocks (beyond 3 IQR); the estimate includes them"
    NO_STEADY_STATE = "no_steady_state", "the timing did not settle; measure longer for a verdict"
    GOT_SLOWER = "got_slower", "later calls were slower; look for throttling or a growing cache"
    AUTOCORRELATED = (
        "autocorrelated",
        "successive blocks are correlated, so the interval is too narrow; repeat and compare runs",
    )
    LOW_SAMPLE_COUNT = "low_sample_count", "too few blocks for a 95 % interval; raise budget_s"
    CACHED_RESULT = "cached_result", "later calls returned the first result; make each call compute"
    THROTTLED = "throttled", "the device lowered its clock, or a CPU quota paused the process"
    LAUNCH_BOUND = "launch_bound", "launches limit the speed; compile, or use a CUDA graph"
    OVERSUBSCRIBED = "oversubscribed", "the ranks share cores or GPUs, so the speed is not valid"
    BUSY_MACHINE = "busy_machine", "other programs used the CPUs; repeat the run on an idle machine"
    SEQUENTIAL = "sequential", "cases did not fit in memory together; ratios include machine drift"
    OUTLIERS_REMOVED = "outliers_removed", "nanolib removed outliers, so the interval is not valid"
    MASK_IS_DENSE = (
        "mask_is_dense",
        "the mask removes no pairs; use longer seq_lens, a sparser pattern, or causal: false",
    )


OVER = " over "  # Separator of the timed scope and the baseline in the scope of a speed-up.
LEARNING_STEPS = 200  # Shorter training runs show only that the code works.
SMOKE_TEST = f"a smoke test (fewer than {LEARNING_STEPS} steps)"


@dataclass(frozen=True)
class Metric:
    """A quantity that nanolib can measure, and its unit."""

    name: str
    unit: str
    title: str  # without the unit
    direction: Direction = Direction.LOWER

    @property
    def is_timed(self) -> bool:
        """Whether other processes on the machine affect this metric."""
        return self.unit in _TIMED_UNITS or self.name in _TIMED


_TIMED_UNITS = {"ms", "s", "1/s", "FLOP/s", "B/s", "J", "W"}
_TIMED = {"mfu", "speed_up", "overhead", "warmup_needed"}
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("case_duration", "s", "Wall time"),
        Metric("latency", "ms", "Latency"),
        Metric("peak_memory", "MiB", "Peak live memory"),
        Metric("reserved_memory", "MiB", "Peak reserved memory"),
        Metric("resident_memory", "MiB", "Peak resident set above the start"),
        Metric("weight_memory", "MiB", "Weight memory", Direction.EQUAL),
        Metric("parameters", "1", "Parameters", Direction.EQUAL),
        Metric("flops", "FLOP", "Work", Direction.EQUAL),
        Metric("bytes", "B", "Minimum traffic", Direction.EQUAL),
        Metric("flops_per_second", "FLOP/s", "Achieved rate", Direction.HIGHER),
        Metric("mfu", "1", "Share of the measured peak (MFU)", Direction.HIGHER),
        Metric("ceiling_flops", "FLOP/s", "Peak matrix-product rate", Direction.HIGHER),
        Metric("ceiling_bytes", "B/s", "Peak copy bandwidth", Direction.HIGHER),
        Metric("tokens_per_second", "1/s", "Throughput", Direction.HIGHER),
        Metric("sparsity", "1", "Sparsity", Direction.EQUAL),
        Metric("block_sparsity", "1", "Block sparsity", Direction.EQUAL),
        Metric("relative_error", "1", "Relative error"),
        Metric("ulp_difference", "ULP", "Largest difference of logits"),
        Metric("greedy_agreement", "1", "Greedy tokens that agree", Direction.HIGHER),
        Metric("loss", "nats", "Loss"),
        Metric("loss_difference", "nats", "Loss above dense"),
        Metric("loss_difference_from_bf16", "nats", "Loss above bf16"),
        Metric("sqnr", "dB", "Signal to quantization noise", Direction.HIGHER),
        Metric("converted_share", "1", "FLOPs in FP8", Direction.EQUAL),
        Metric("speed_up", "1", "Speed-up", Direction.HIGHER),
        Metric("warmup_needed", "1", "Steps until steady"),
        Metric("energy", "J", "Energy"),
        Metric("net_energy", "J", "Energy above idle"),
        Metric("energy_per_token", "J", "Energy per token"),
        Metric("power", "W", "Power"),
        Metric("layer_time", "ms", "Layer time"),
        Metric("layer_energy", "J", "Layer energy, by the layer's share of the time"),
        Metric("overhead", "1", "Profiling overhead"),
        Metric("component_time", "ms", "Component time"),
        Metric("communication_steps", "1", "Communication steps", Direction.EQUAL),
        Metric("wire_bytes", "B", "Bytes sent"),
        Metric("link_latency", "ms", "Message latency"),
        Metric("link_bandwidth", "B/s", "Bandwidth of a rank's link", Direction.HIGHER),
    )
}


class BadInput(ValueError):
    """An input is not valid. Each line names a field and its value, and shows what to do."""

    def __init__(self, *lines: str):
        self.lines = tuple(" ".join(line.split()) for line in lines)
        super().__init__("\n".join(self.lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process builds the same error."""
        return type(self), self.lines

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback."""
        return [f"BadInput: {line}" for line in self.lines]


class Unsupported(RuntimeError):
    """This machine or build cannot run a case, for the reason in the message."""

    status = Status.UNSUPPORTED


@dataclass(frozen=True)
class Measurement:
    """One result, with its interval, its method and its prediction.

    Attributes:
        metric: Name of a metric in `METRICS`, which defines the unit.
        estimate: The estimate in the metric's unit, or None if the case has no result.
        low: Lower end of the interval. A deterministic metric has `low` equal to `estimate`.
        high: Upper end of the interval.
        confidence: Coverage of the interval in (0, 1), or 1 for a deterministic metric.
        n: Number of independent samples that give the interval. For latency, a sample is a block.
        samples: All samples in the metric's unit, in the order of measurement.
        predicted: The value that a formula predicts, in the metric's unit.
        provenance: Source of the number.
        method: Method of measurement, such as `perf_counter`, `cuda_event` or `formula`.
        scope: Part of the case that was measured, such as `forward` or `optimizer_step`.
        status: Status of the case at its end.
        message: Reason for the status, in one line.
        flags: Labels to show next to the number.
        details: More values, such as the mean or the reason why sampling stopped, as JSON types.
    """

    metric: str
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    n: int = 0
    samples: tuple[float, ...] = ()
    predicted: float | None = None
    provenance: Provenance = Provenance.MEASURED
    method: str = ""
    scope: str = ""
    status: Status = Status.OK
    message: str = ""
    flags: tuple[Flag, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """Return the unit of the estimate."""
        return METRICS[self.metric].unit

    def __str__(self) -> str:
        """Return the estimate with its interval, with as many digits as the interval supports."""
        name = f"{self.metric} {self.scope}".strip()
        if self.estimate is None:
            return f"{name}: {self.status} {self.message}".rstrip()
        number = format_with_interval(self.estimate, self.low, self.high)
        value, *interval = number.split(" ", 1)
        words = [value, *([] if self.unit == "1" else [self.unit]), *interval]
        notes = "".join(f"; {Flag(flag).text}" for flag in self.flags)
        return f"{name}: {' '.join(words)} (n={self.n}, {self.method}){notes}"


Measurements = Iterator[Measurement]


def exact(metric: str, value: float, **rest) -> Measurement:
    """Return a measurement of a deterministic value. Both ends of its interval equal the value.

    Args:
        metric: Name of the metric.
        value: The value in the metric's unit.
        rest: More fields of the measurement, such as `scope`. The default `method` is `formula`.
    """
    rest = {"confidence": 1.0, "n": 1, "low": value, "high": value, "method": "formula"} | rest
    return Measurement(metric, value, **rest)


def printable(text: str) -> str:
    """Escape control characters and invisible characters, as `repr` does."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def one_line(error: BaseException | str) -> str:
    """Return a text, or the message of an exception, on one line of at most 500 characters."""
    return " ".join(str(error).split())[:500]


def cause(error: BaseException) -> str:
    """Return the type and the message of an exception in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def did_you_mean(word, known: Iterable[str], otherwise: str = "") -> str:
    """Return `did you mean …?` with a similar known word, or `otherwise` if no word is similar."""
    near = difflib.get_close_matches(str(word), known, 1)
    return f"did you mean {near[0]}?" if near else otherwise


def quote(value) -> str:
    """Return a value as one line for an error message, shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
