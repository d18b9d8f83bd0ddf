"""The vocabulary: every metric, status, flag and provenance, and the row that everything exchanges.

The database schema, the charts, the verdicts and the tests derive from what is declared here, so that a word means the
same thing everywhere. Standard library only: anything may import this module and pay nothing.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


class Direction(enum.StrEnum):
    """Which way a metric is better; `EQUAL` marks a deterministic one that must not change at all."""

    LOWER = "lower"
    HIGHER = "higher"
    EQUAL = "equal"


class Status(enum.StrEnum):
    """How a case ended. `STARTED` is a case in flight, or one whose process died."""

    STARTED = "started"
    OK = "ok"
    OOM = "oom"
    OOM_PREDICTED = "oom_predicted"
    UNSUPPORTED = "unsupported"
    TIMEOUT = "timeout"
    ERROR = "error"


class Held(enum.StrEnum):
    """What bytes at a peak are held as, in the order of charts and tables.

    `GATHERED` is FSDP's: the weights of the block that computes, of the next, and of what lies in no block. `UNATTRIBUTED` is a
    peak, where or as far as nobody knows what fills it.
    """

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    SAVED = "saved activations"
    CACHE = "cache"
    INPUTS = "inputs"
    TEMPORARIES = "temporaries"
    GATHERED = "gathered weights"
    UNATTRIBUTED = "unattributed"


RUN_ID = re.compile(
    "-".join(f"[0-9a-f]{{{n}}}" for n in (8, 4, 4, 4, 12))
)  # a UUID; people see its first part
MOST_LABEL = 200  # characters of what people call a run


class RunStatus(enum.StrEnum):
    """Where a run stands. `DONE` is written last, so it alone means that everything is there."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Provenance(enum.StrEnum):
    """Where a number comes from. Numbers of different provenance are never drawn alike nor mixed in a sum."""

    MEASURED = "measured"
    EMULATED = "emulated"
    ESTIMATED = "estimated"
    MODELLED = "modelled"
    REPLAYED = "replayed"


class Flag(enum.StrEnum):
    """A label that a reader should see beside the number; it never changes the number."""

    OUTLIERS_MILD = "outliers_mild"
    OUTLIERS_SEVERE = "outliers_severe"
    NO_STEADY_STATE = "no_steady_state"
    SLOWDOWN = "slowdown"
    AUTOCORRELATED = "autocorrelated"
    FEW_BLOCKS = "few_blocks"
    CACHED_RESULT = "cached_result"
    THROTTLED = "throttled"
    LAUNCH_BOUND = "launch_bound"
    OVERSUBSCRIBED = "oversubscribed"
    BUSY_MACHINE = "busy_machine"
    SEQUENTIAL = "sequential"
    OUTLIERS_REMOVED = "outliers_removed"
    NOT_SPARSE = "not_sparse"


FLAG_TEXT: dict[Flag, str] = {
    Flag.OUTLIERS_MILD: "some blocks lie beyond 1.5 IQR; they are kept",
    Flag.OUTLIERS_SEVERE: "some blocks lie beyond 3 IQR; they are kept",
    Flag.NO_STEADY_STATE: "the timing kept changing; draw no verdict, measure longer or on a quieter machine",
    Flag.SLOWDOWN: "it got slower while it ran; look for throttling or a growing cache",
    Flag.AUTOCORRELATED: "neighbouring blocks resemble each other, so the interval is too narrow; use longer blocks",
    Flag.FEW_BLOCKS: "fewer than 6 blocks fitted the time budget, too few for a 95 % interval; raise budget_s",
    Flag.CACHED_RESULT: "later calls returned the first call's result; time a function that computes it in each call",
    Flag.THROTTLED: "the device lowered its clock while it ran, or a CPU quota held the process back",
    Flag.LAUNCH_BOUND: "launching takes the host as long as the device takes to compute; a CUDA graph or compiling would help",
    Flag.OVERSUBSCRIBED: "more ranks than cores or devices; no speed claim rests on this row",
    Flag.BUSY_MACHINE: "other processes used the machine meanwhile; repeat it when the machine is quiet",
    Flag.SEQUENTIAL: "timed by itself, since its group does not fit into memory; a ratio to others holds what the machine did",
    Flag.NOT_SPARSE: "its mask removes nothing at this length, so it is dense; smaller tiles (block_size) help",
    Flag.OUTLIERS_REMOVED: "outliers were removed on request; the interval is not valid",
}


OVER = " over "  # in the scope of a speed-up, between what was timed and its baseline
LEARNING_STEPS = (
    200  # of training: runs that are shorter show that it runs, and nothing of what it would learn
)
SMOKE_TEST = f"a smoke test: nothing is said of runs under {LEARNING_STEPS} steps"


@dataclass(frozen=True)
class Metric:
    """One thing that can be measured.

    Attributes:
        name: The name in the database.
        unit: The unit of `estimate`, `low`, `high`, `samples` and `predicted`.
        direction: Which way is better.
        title: How a chart's axis names it, without the unit.
    """

    name: str
    unit: str
    direction: Direction
    title: str

    @property
    def is_timed(self) -> bool:
        """Whether what else runs on the machine changes it."""
        return self.unit in _TIMED_UNITS or self.name in _TIMED


_TIMED_UNITS = frozenset({"ms", "s", "1/s", "FLOP/s", "B/s", "J", "J·s", "W"})
_TIMED = frozenset(
    {"ceiling_share", "speed_up", "ratio", "overhead", "time_share", "warmup_needed"}
)
_LOWER, _HIGHER, _EQUAL = Direction.LOWER, Direction.HIGHER, Direction.EQUAL

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("case_time", "s", _LOWER, "Wall time"),
        Metric("latency", "ms", _LOWER, "Latency"),
        Metric("peak_memory", "MiB", _LOWER, "Peak live memory"),
        Metric("reserved_memory", "MiB", _LOWER, "Peak reserved memory"),
        Metric("resident_memory", "MiB", _LOWER, "Peak resident set above the start"),
        Metric("footprint", "MiB", _EQUAL, "Weight memory"),
        Metric("parameters", "1", _EQUAL, "Parameters"),
        Metric("flops", "FLOP", _EQUAL, "Work"),
        Metric("bytes", "B", _EQUAL, "Bytes that must move"),
        Metric("flops_per_second", "FLOP/s", _HIGHER, "Achieved rate"),
        Metric("ceiling_share", "1", _HIGHER, "Share of the measured ceiling"),
        Metric("ceiling_flops", "FLOP/s", _HIGHER, "Matrix-product ceiling"),
        Metric("ceiling_bytes", "B/s", _HIGHER, "Copy-bandwidth ceiling"),
        Metric("tokens_per_second", "1/s", _HIGHER, "Throughput"),
        Metric("sparsity", "1", _EQUAL, "Connections removed"),
        Metric("block_sparsity", "1", _EQUAL, "Tiles skipped"),
        Metric("relative_error", "1", _LOWER, "Relative error"),
        Metric("loss", "nats", _LOWER, "Loss"),
        Metric("loss_difference", "nats", _LOWER, "Loss above dense"),
        Metric("parity", "nats", _LOWER, "Loss above bf16"),
        Metric("sqnr", "dB", _HIGHER, "Signal to quantisation noise"),
        Metric("underflow", "1", _LOWER, "Elements that vanish"),
        Metric("overflow", "1", _LOWER, "Elements that saturate"),
        Metric("memory_part", "MiB", _LOWER, "Memory by what holds it"),
        Metric("converted_share", "1", _EQUAL, "FLOPs in FP8"),
        Metric("speed_up", "1", _HIGHER, "Speed-up"),
        Metric("ratio", "1", _LOWER, "Time of B over time of A"),
        Metric("warmup_needed", "1", _LOWER, "Steps until steady"),
        Metric("energy", "J", _LOWER, "Energy"),
        Metric("net_energy", "J", _LOWER, "Energy above idle"),
        Metric("energy_per_token", "J", _LOWER, "Energy per token"),
        Metric("energy_delay", "J·s", _LOWER, "Energy–delay product"),
        Metric("power", "W", _LOWER, "Power"),
        Metric("layer_time", "ms", _LOWER, "Time of a layer"),
        Metric("layer_energy", "J", _LOWER, "Energy of a layer, by its share of the time"),
        Metric("overhead", "1", _LOWER, "Cost of profiling"),
        Metric("part_time", "ms", _LOWER, "Time of a part"),
        Metric("time_share", "1", _LOWER, "Share of a rank's own time"),
        Metric("rounds", "1", _EQUAL, "Communication steps"),
        Metric("wire_bytes", "B", _LOWER, "Bytes sent"),
        Metric("link_latency", "ms", _LOWER, "Cost of a message"),
        Metric("link_bandwidth", "B/s", _HIGHER, "Bandwidth of a rank's link"),
        Metric("exposed_communication", "ms", _LOWER, "Communication that computing does not hide"),
    )
}


class BadInput(ValueError):
    """Input that cannot be used; each line names a field, its value and the remedy.

    Args:
        lines: One complaint per line.
    """

    def __init__(self, *lines: str) -> None:
        self.lines = tuple(" ".join(line.split()) for line in lines)
        super().__init__("\n".join(self.lines))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook instead of a traceback."""
        return [f"BadInput: {line}" for line in self.lines]


class Unsupported(RuntimeError):
    """This machine or this build cannot run the case; the message says why and what would."""


@dataclass(frozen=True)
class Measurement:
    """One number: how it was made, how sure it is, and what was predicted.

    Attributes:
        metric: A name in `METRICS`, which gives the unit.
        estimate: The estimate in the metric's unit; None when the case gave no number.
        low: Lower end of the interval; equal to `estimate` for a deterministic metric.
        high: Upper end of the interval.
        confidence: Coverage of the interval in (0, 1); 1 for a deterministic metric.
        n: How many independent pieces of evidence (for latency: blocks) the interval rests on.
        samples: Every sample, in the order taken and in the metric's unit.
        predicted: What a formula said beforehand.
        provenance: Where the number comes from.
        method: How it was made: `perf_counter`, `cuda_event`, `formula`, `live_tensor_bytes`, ...
        scope: Of what: `forward`, `backward`, `optimizer_step`, ...
        status: How it ended.
        message: Why, in one line.
        flags: What a reader should know before believing it.
        details: What the metric alone needs (mean, percentiles, stop reason, ...); JSON types only.
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

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise BadInput(
                f"metric: {self.metric!r} is not declared; use one of {', '.join(sorted(METRICS))}"
            )

    @property
    def unit(self) -> str:
        """The unit of the number."""
        return METRICS[self.metric].unit

    @property
    def half_width(self) -> float | None:
        """Half the interval's width as a share of the estimate; None without an interval."""
        if self.estimate is None or self.low is None or self.high is None or not self.estimate:
            return None
        return (self.high - self.low) / 2 / abs(self.estimate)

    def __str__(self) -> str:
        """The number with its interval, in as many digits as the interval supports."""
        name = " ".join(part for part in (self.metric, self.scope) if part)
        if self.estimate is None:
            return f"{name}: {self.status} {self.message}".rstrip()
        value = format_number(self.estimate, self.low, self.high)
        interval = ""
        if self.low is not None and self.high is not None and self.low != self.high:
            bounds = " … ".join(
                format_number(end, self.low, self.high) for end in (self.low, self.high)
            )
            interval = f" [{bounds}]"
        unit = "" if self.unit == "1" else f" {self.unit}"
        notes = "".join(f"; {FLAG_TEXT[Flag(flag)]}" for flag in self.flags)
        return f"{name}: {value}{unit}{interval} (n={self.n}, {self.method}){notes}"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON types; `from_dict` is its inverse."""
        row = {f.name: getattr(self, f.name) for f in fields(self)}
        return row | {
            "samples": list(self.samples),
            "flags": list(self.flags),
            "details": dict(self.details),
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Measurement:
        """The row that `to_dict` wrote."""
        return cls(
            **dict(row)
            | {
                "samples": tuple(row["samples"]),
                "flags": tuple(Flag(flag) for flag in row["flags"]),
                "status": Status(row["status"]),
                "provenance": Provenance(row["provenance"]),
            }
        )


def exact(
    metric: str, value: float, *, scope: str = "", method: str = "formula", **rest: Any
) -> Measurement:
    """A measurement of something deterministic: its interval is the value itself."""
    rest = {"confidence": 1.0, "n": 1, "low": value, "high": value} | rest
    return Measurement(metric, value, scope=scope, method=method, **rest)


def printable(text: str) -> str:
    """The text with escapes, as `repr` writes them, for what acts on a terminal or hides: control, direction, line ends."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    )


def did_you_mean(word: Any, known: Iterable[str], otherwise: str = "") -> str:
    """A question that names the known word nearest to one that is not known; `otherwise` where none is near."""
    import difflib  # for mistakes alone

    near = difflib.get_close_matches(str(word), [*known], 1)
    return f"did you mean {near[0]}?" if near else otherwise


def shown(value: Any) -> str:
    """The value as complaints show it: on one line, its middle left out where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return (
        text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
    )  # of a path the end tells most


def with_unit(figure: str) -> str:
    """A metric, with its scope or without, and its unit where it has one: `latency forward, ms`."""
    metric = METRICS.get(figure.partition(" ")[0])
    return figure if metric is None or metric.unit == "1" else f"{figure}, {metric.unit}"


def format_number(value: float, low: float | None = None, high: float | None = None) -> str:
    """`value` in as many digits as the width of its interval supports (3 to 6 significant ones).

    Args:
        value: The number.
        low: Lower end of its interval, if it has one.
        high: Upper end.
    """
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and (low is None or low == high):
        return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.4g}"
    digits = 4
    if low is not None and high is not None and high > low and value:
        digits = min(6, max(3, 1 + math.ceil(math.log10(abs(value) / (high - low)))))
    if 1e-3 <= abs(value) < 1e6:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{decimals}f}"
    return f"{value:.{digits - 1}e}" if value else "0"


def scaled(value: float, unit: str) -> str:
    """A rate or a size in the prefix that leaves one to three digits before the point.

    Example:
        >>> scaled(2.04e11, "FLOP/s"), scaled(999.0, "B/s")
        ('204 GFLOP/s', '999 B/s')
    """
    power = min(5, max(0, math.floor(math.log10(abs(value)) / 3))) if value else 0
    return f"{value / 1000**power:.3g} {' kMGTP'[power].strip()}{unit}"


def format_with_interval(value: float, low: float | None, high: float | None) -> str:
    """`12.3 [12.1 … 12.5]`; the value alone where an end is missing (None or NaN)."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return format_number(value)
    ends = " … ".join(format_number(end, low, high) for end in (low, high))
    return f"{format_number(value, low, high)} [{ends}]"


def case_name(factors: Mapping[str, Any]) -> str:
    """The factors by which people tell cases apart, in the order in which they think of them."""
    kinds = (
        "name", "ceiling", "mode", "phase", "look", "direction", "form", "memory_form",
        "precision", "arm", "variant",
    )  # fmt: skip
    named = [str(factors[name]) for name in kinds if name in factors]
    if {"m", "k", "n"} <= factors.keys():
        named.append(f"{factors['m']}x{factors['k']}x{factors['n']}")
    if factors.get("compiled"):
        named.append("compiled")
    sized = ("seq_len", "batch_size", "dtype", "world_size", "process", "steps")
    return " ".join(named + [f"{name}={factors[name]}" for name in sized if name in factors])
