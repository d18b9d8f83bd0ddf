"""What charts and tables rely on in a row, by experiment: factors and details that it must hold, beside their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanolib.measurement import shown

_Test = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _maybe(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _known(value: Any) -> bool:
    return value is not None and not isinstance(value, dict | list)


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _all(test: _Test, length: int | None = None) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value)) and length in (None, len(value))


def _by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_number, value.values()))


# Of a case that has the first factor (or any, but for ceilings), the others must be there.
_FACTORS: dict[tuple[str, str], dict[str, _Test]] = {
    ("attention", "name"): dict.fromkeys(("seq_len", "batch_size", "dtype", "causal", "device"), _known),
    ("attention", "pattern"): {"target": _number, "seeds": _count},
    ("model", "mode"): dict.fromkeys(("name", "attention_type", "seq_len", "batch_size", "dtype", "device"), _known),
    ("warmup", "process"): {"direction": _known, "warmup_steps": lambda value: isinstance(value, list)},
    ("energy", "phase"): dict.fromkeys(("name", "seq_len", "batch_size"), _known),
    ("fp8", "preset"): dict.fromkeys(("name", "mode", "precision", "compiled", "seq_len", "batch_size"), _known),
    ("fp8", "arm"): {"seeds": _count, "steps": _count},
    ("fp8", "m"): {"m": _count, "k": _count, "n": _count, "precision": _text},
    ("distributed", "forms"): dict.fromkeys(("seq_len", "dtype", "world_size"), _known),
    ("distributed", "prefill_forms"): dict.fromkeys(("seq_len", "dtype", "world_size"), _known),
    ("distributed", "memory_form"): dict.fromkeys(("seq_len", "world_size"), _known),
    ("distributed", "strategies"): dict.fromkeys(("name", "world_size"), _known),
}
# Of a row of this metric with a number, its details; of one whose scope is given, those of that scope alone.
_SPREAD = dict.fromkeys(("mean", "sd"), _number)
_DETAILS: dict[tuple[str, str, str], dict[str, _Test]] = {
    ("model", "latency", "decode"): dict.fromkeys(("p50", "p95", "p99"), _number),
    ("warmup", "latency", ""): _SPREAD | {"cv": _number},
    ("warmup", "warmup_needed", ""): {"steady_median": lambda value: value is None or _number(value)},
    ("fp8", "converted_share", ""): {"amdahl_bound": _number},
    ("fp8", "speed_up", "training_step"): {"what": _text},
    ("energy", "layer_time", ""): {
        "layer": _text,
        "share": _number,
        **dict.fromkeys(("operations_ms", "activations", "deep"), _maybe(_by_name)),
    },
    ("energy", "overhead", ""): {
        "threads": _number,
        "cpu": _all(_number, 3),
        "plain_ms": _number,
        "pass_ms": _maybe(_number),
    },
    ("distributed", "link_latency", ""): {"largest_residual": _number},
    ("ab", "ratio", ""): {
        **dict.fromkeys(("kind", "a", "b"), _text),
        **dict.fromkeys(("base_ms", "current_ms"), _all(_number)),
        "rounds": _known,
        "threshold": _number,
    },
}
# Wherever they stand.
_IF_THERE: dict[tuple[str, str], dict[str, _Test]] = {
    ("energy", "power"): {"course_s": _all(_number), "course_w": _all(_number)},
    ("distributed", "latency"): {"collective": _text, "payload": _count, "form": _text, "world_size": _count},
}


def lacking(row: Mapping[str, Any]) -> str:
    """What charts and tables miss in a row that is sound by itself; empty for nothing.

    Args:
        row: Of the measurements, JSON parsed.
    """
    experiment, metric, factors, details = (row[name] for name in ("experiment", "metric", "factors", "details"))
    for (of, factor), needed in _FACTORS.items():
        if of != experiment or (factor == "name" and factors.get("pattern") is not None):
            continue
        if factors.get(factor) is not None or (not factor and "ceiling" not in factors):
            for name, test in needed.items():
                if not test(factors.get(name)):
                    return f"factors: {name} is {shown(factors.get(name))}"
    needed = _IF_THERE.get((experiment, metric), {}) | {"of": _text}
    needed = {name: test for name, test in needed.items() if name in details}
    if row["estimate"] is not None:
        needed |= _DETAILS.get((experiment, metric, ""), {}) | _DETAILS.get((experiment, metric, row["scope"]), {})
    for name, test in needed.items():
        if not test(details.get(name)):
            return f"details: {name} is {shown(details.get(name))}"
    return _misplaced(experiment, metric, row["scope"], row["estimate"] is not None, factors, details)


def _misplaced(
    experiment: str, metric: str, scope: str, measured: bool, factors: Mapping[str, Any], details: Mapping[str, Any]
) -> str:
    """What does not fit its scope, in which charts find two names, or what does not fit together."""
    of = {name for name in ("prefill_forms", "variant", "world_size") if factors.get(name) is not None}
    if experiment == "distributed" and measured:
        _, mark, part = scope.partition(": ")
        if metric == "latency" and "prefill_forms" in of and len(scope.split()) != 2:
            return f"scope: {shown(scope)} is no form and direction"
        if metric == "part_time" and "world_size" in of and (not mark or ": " in part):
            return f"scope: {shown(scope)} is no form and component"
        if (
            metric == "part_time"
            and part not in ("compute", "wait", "communication")
            and not _ranks(details.get("ranks"))
        ):
            return f"details: ranks is {shown(details.get('ranks'))}"
    if experiment == "fp8" and "variant" in of and metric in _OF_PRODUCTS and " " not in scope:
        return f"scope: {shown(scope)} is no layer and product"
    if experiment == "fp8" and metric == "parity":
        for name, test in _PARITY.items():
            if not test(details.get(name)):
                return f"details: {name} is {shown(details.get(name))}"
    if experiment == "energy" and metric == "overhead" and not scope.split():
        return "scope: it names no mode"
    if (
        experiment == "energy"
        and metric == "power"
        and len(details.get("course_s", ())) != len(details.get("course_w", ()))
    ):
        return "details: course_s and course_w are not of one length"
    return ""


_OF_PRODUCTS = ("relative_error", "sqnr", "underflow", "overflow", "fp8_scale")
_PARITY = {
    "verdict": _text,
    "control": lambda value: isinstance(value, bool),
    "margin_nats": _maybe(_number),
    "tenths": _maybe(_all(_all(_number, 3))),
}


def _ranks(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(rank, dict) and all(_number(rank.get(name)) for name in _SPREAD) for rank in value)
    )
