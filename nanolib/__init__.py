"""Measure transformers on this machine, with a method and an interval for every number.

Public names are loaded on first use, so that `import nanolib` is fast.
"""

import atexit
import gc
from typing import Any

__version__ = "0.3.0"

# Frozen objects save a second per process, because Python does not search them for garbage at exit.
atexit.register(gc.freeze)

__all__ = [
    "PRESETS",
    "NanoConfig",
    "Store",
    "create_model",
    "generate_random_batch",
    "measure",
    "plan",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    match name:
        case "NanoConfig" | "PRESETS":
            from nanolib import config as home
        case "create_model" | "generate_random_batch":
            from nanolib import models as home
        case "measure":
            from nanolib import meters as home
        case "plan":
            from nanolib.experiments.model import planning as home
        case "Store":
            from nanolib import store as home
        case _:
            raise AttributeError(
                f"module 'nanolib' has no attribute {name!r}; public names: {', '.join(__all__)}"
            )
    return getattr(home, name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
