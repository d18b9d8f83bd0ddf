"""What `server.py` needs of a version, by the names that the version itself has for it.

Versions before 0.2 filed the same things elsewhere. This file is the one place that knows. It imports nothing of nanolib's: the
process that it runs in is the version's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_CASES = ("nanolib.experiments.{}.cases", "nanolib.experiments.{}")
_LATENCY = ("nanolib.meters.time.latency", "nanolib.meters.latency")
_OUTCOME = ("nanolib.run.outcome", "nanolib.experiments.outcome")


# What parameters were called before.
_PARAMETERS = {
    "rel_ci": "precision",
    "attention_types": "kinds",
    "algorithms": "forms",
    "prefill_algorithms": "prefill_forms",
    "excluded_modules": "keep",
}


def parameters(values: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Parameters of today as the version's `Params` has them.

    Args:
        values: Name → value.
        params: The version's class.
    """
    there = params.model_fields
    if "precision" not in there:
        return dict(values)
    old = {name if name in there else _PARAMETERS.get(name, name): value for name, value in values.items()}
    if isinstance(arms := old.get("parity_arms"), list):
        old["parity_arms"] = [arm.removeprefix("fp8_") if isinstance(arm, str) else arm for arm in arms]
    return old


def experiment(name: str) -> ModuleType:
    """The module with `Params` and `cases`.

    Raises:
        ImportError: The version has no such experiment.
    """
    return _first(*(place.format(name) for place in _CASES))


def measuring(module: ModuleType, case: Any, params: Any, collect: Callable[..., Any]) -> Callable[[], Any] | None:
    """What yields the rows of a case whose blocks of calls `collect` takes.

    Args:
        module: From `experiment`.
        case: One of its cases.
        params: Its parameters.
        collect: As `measure` of this version takes it.

    Returns:
        None where the version cannot be told who collects: it is older than `nano ab`.
    """
    if not hasattr(module, "measure_case"):
        run = importlib.import_module("nanolib.run.workload")
        return lambda: run.measure_case(case, params.collected_by(collect), {})
    latency = _first(*_LATENCY)  # to version 0.3 it had a global for that, and a module measured its cases
    if not hasattr(latency, "collect_blocks"):
        return None
    latency.collect_blocks = collect
    return lambda: module.measure_case(case, params, {})


def outcome() -> ModuleType:
    """The module whose `attempt` runs a case to its end."""
    return _first(*_OUTCOME)


def memory() -> ModuleType:
    """The module with `measure_memory`."""
    return importlib.import_module("nanolib.meters.memory")


def _first(*names: str) -> ModuleType:
    """The first of these modules of which the version has the file, or the last.

    To import is not to ask: where nanolib is installed to be edited, what a version lacks comes from the installed one.
    """
    folders = [Path(folder) for folder in importlib.import_module("nanolib").__path__]
    for name in names:
        parts = name.split(".")[1:]
        if any(folder.joinpath(*parts).with_suffix(".py").is_file() for folder in folders):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])
