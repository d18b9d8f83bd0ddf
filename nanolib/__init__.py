"""nanolib: measure transformers on this machine; every number says how it was made and how sure it is.

Names below are loaded when they are first used, so that `import nanolib` costs next to nothing.
"""

import atexit
import gc
from typing import Any

__version__ = "0.3.0"

# A process that ends has no use for a last search through all that torch imported: it took a second of each
# kernel and rank.
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
    """Load a public name from its home on first use."""
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
    """The public names."""
    return sorted(__all__)
