"""One room per notebook: `cases` holds its `Params`, its cases and how they are measured.

A new notebook is a room here with a line in `ALL`, a notebook of the same name, and one params file per suite. `run.sweep` is the
one path by which numbers are made; everything else reads the rows that it writes.
"""

from collections.abc import Callable
from types import ModuleType


def _attention() -> ModuleType:
    from nanolib.experiments.attention import cases

    return cases


def _model() -> ModuleType:
    from nanolib.experiments.model import cases

    return cases


def _warmup() -> ModuleType:
    from nanolib.experiments.warmup import cases

    return cases


def _energy() -> ModuleType:
    from nanolib.experiments.energy import cases

    return cases


def _fp8() -> ModuleType:
    from nanolib.experiments.fp8 import cases

    return cases


def _distributed() -> ModuleType:
    from nanolib.experiments.distributed import cases

    return cases


def _summary() -> ModuleType:
    from nanolib.experiments.summary import cases

    return cases


# Notebook → what loads its experiment: imports that the contract sees, and none before it is asked for.
ALL: dict[str, Callable[[], ModuleType]] = {
    "attention": _attention,
    "model": _model,
    "warmup": _warmup,
    "energy": _energy,
    "fp8": _fp8,
    "distributed": _distributed,
    "summary": _summary,
}
