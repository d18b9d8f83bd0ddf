"""A user's modules imported a second time, for tensors without data.

What code keeps between calls, such as tables by length or a whole model, would else be without data in the run that follows.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

_OTHERS = {name.partition(".")[0] for name in sys.modules} | {"nanolib"}  # whose state is none of the user's
_INSTALLED = {"site-packages", "dist-packages"}
_TWINS: dict[Path, dict[str, ModuleType]] = {}  # folder → the modules in it that tensors without data know


def imported(name: str) -> ModuleType:
    """A module of the user's; where tensors have no data another than elsewhere, with whatever lies beside it."""
    with unset_fake_temporarily():  # what a module makes when it is imported has data
        module = importlib.import_module(name)
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    if detect_fake_mode() is None or package in _OTHERS or file is None:
        return module
    folder = Path(file).parents[1 if Path(file).stem == "__init__" else 0]
    with contextlib.suppress(Exception, SystemExit), unset_fake_temporarily(), _swapped(folder, package):
        return importlib.import_module(name)
    return module  # it cannot be imported twice


@contextlib.contextmanager
def _swapped(folder: Path, package: str) -> Iterator[None]:
    """Within it the modules of a folder are their twins."""

    def taken() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if _theirs(name, folder, package)}

    known = taken()
    sys.modules.update(_TWINS.get(folder, {}))
    try:
        yield
    finally:
        _TWINS[folder] = taken()
        sys.modules.update(known)


def _theirs(name: str, folder: Path, package: str) -> bool:
    """Whether a module is of the package, or of the folder that it lies in and not installed there."""
    top = name.partition(".")[0]
    if top == package or top in _OTHERS:
        return top == package
    file = Path(getattr(sys.modules[name], "__file__", None) or "/")
    return file.is_relative_to(folder) and not _INSTALLED & {*file.parts}
