"""One folder per notebook: `cases` has its `Params` and cases, `view` its charts and findings.

To add a notebook, add its folder, a line in `ALL` and one in `sections`, a notebook of the same
name, and a params file per suite. `run.sweep` makes all rows, and everything else reads them.
"""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanolib.report.section import Section


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


# Notebook → loader of its experiment. Each one is imported only when it is used.
ALL: dict[str, Callable[[], ModuleType]] = {
    "attention": _attention,
    "model": _model,
    "warmup": _warmup,
    "energy": _energy,
    "fp8": _fp8,
    "distributed": _distributed,
    "summary": _summary,
}


def sections() -> tuple["Section", ...]:
    """Return the sections of the report: one per notebook that measures, and that of `nano ab`."""
    from nanolib.experiments.attention import view as attention
    from nanolib.experiments.distributed import view as distributed
    from nanolib.experiments.energy import view as energy
    from nanolib.experiments.fp8 import view as fp8
    from nanolib.experiments.model import view as model
    from nanolib.experiments.warmup import view as warmup
    from nanolib.report.regressions import AB_SECTION

    return (
        *(view.SECTION for view in (attention, model, warmup, energy, fp8, distributed)),
        AB_SECTION,
    )
