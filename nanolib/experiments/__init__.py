"""One folder per notebook: `cases` has its `Params` and cases, `view` its charts and findings.

To add a notebook, add its folder, its name in `MEASURING`, a notebook of the same name, and a
params file per suite. `run.sweep` makes all rows, and everything else reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanolib.report.section import Section

MEASURING = ("attention", "model", "warmup", "energy", "fp8", "distributed")

# Notebook → loader of its experiment. Each one is imported only when it is used.
ALL: dict[str, Callable[[], ModuleType]] = {
    name: partial(import_module, f"{__name__}.{name}.cases") for name in MEASURING
}
ALL["summary"] = partial(import_module, f"{__name__}.summary")


def sections() -> tuple[Section, ...]:
    """Return the sections of the report: one per notebook that measures, and that of `nano ab`."""
    from nanolib.report.regressions import AB_SECTION

    views = (import_module(f"{__name__}.{name}.view") for name in MEASURING)
    return (*(view.SECTION for view in views), AB_SECTION)
