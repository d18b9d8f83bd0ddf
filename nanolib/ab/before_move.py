"""What `server.py` needs of a version, by the names that the version itself has for it.

Versions before 0.2 filed the same things elsewhere. This file is the one place that knows. It imports nothing of nanolib's: the
process that it runs in is the version's.
"""

from __future__ import annotations

import importlib
from types import ModuleType

_CASES = ("nanolib.experiments.{}.cases", "nanolib.experiments.{}")
_LATENCY = ("nanolib.meters.time.latency", "nanolib.meters.latency")
_OUTCOME = ("nanolib.run.outcome", "nanolib.experiments.outcome")


def experiment(name: str) -> ModuleType:
    """The module with `Params`, `cases` and `measure_case`.

    Raises:
        ImportError: The version has no such experiment.
    """
    return _first(*(place.format(name) for place in _CASES))


def latency() -> ModuleType:
    """The module whose `collect_blocks` times blocks of calls."""
    return _first(*_LATENCY)


def outcome() -> ModuleType:
    """The module whose `attempt` runs a case to its end."""
    return _first(*_OUTCOME)


def memory() -> ModuleType:
    """The module with `measure_memory`."""
    return importlib.import_module("nanolib.meters.memory")


def _first(*names: str) -> ModuleType:
    """The first of these modules that is there; one that is there and broken says so itself."""
    *earlier, last = names
    for name in earlier:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # what is missing is the module or a folder on the way to it, and nothing that it imports
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    return importlib.import_module(last)
