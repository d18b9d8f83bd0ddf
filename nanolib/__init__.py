"""Measure transformers on this machine, with a method and an interval for every number.

Public names are loaded on first use, so that `import nanolib` is fast.
"""

import atexit
import gc
from importlib import import_module
from typing import Any

__version__ = "0.3.0"

# Frozen objects save a second per process, because Python does not search them for garbage at exit.
atexit.register(gc.freeze)

_MODULES = {
    "PRESETS": "config",
    "NanoConfig": "config",
    "Store": "store",
    "create_model": "models",
    "generate_random_batch": "models",
    "measure": "meters",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    """Load a public name on first use."""
    if name not in _MODULES:
        public = ", ".join(__all__)
        raise AttributeError(f"module 'nanolib' has no attribute {name!r}; public names: {public}")
    return getattr(import_module(f"nanolib.{_MODULES[name]}"), name)
