"""Define one experiment per notebook.

Each folder has parameters and cases in `cases`, and charts and findings in `view`. To add a
notebook, add a folder here, its name in `MEASURING`, a notebook of the same name, and a params file
per suite.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType

MEASURING = ("attention", "model", "warmup", "energy", "fp8", "distributed")

# An experiment imports torch, so nanolib imports an experiment only when a command needs it.
ALL: dict[str, Callable[[], ModuleType]] = {
    name: partial(import_module, f"{__name__}.{name}.cases") for name in MEASURING
}
ALL["summary"] = partial(import_module, f"{__name__}.summary")


def sections() -> tuple:
    """Return each measuring notebook's `Section` of the report, in order."""
    return tuple(import_module(f"{__name__}.{name}.view").SECTION for name in MEASURING)
