"""Write the API reference from the docstrings: python -m docs.api FOLDER."""

import importlib
import sys
from pathlib import Path

MODULES = (  # a notebook or a script may call the names in their `__all__`
    "nanolib",
    "nanolib.meters",
    "nanolib.meters.energy",
    "nanolib.meters.layers",
    "nanolib.models",
    "nanolib.models.attention",
    "nanolib.run.sweep",
    "nanolib.report.display",
    "nanolib.store",
)


def write(folder: Path) -> Path:
    """Write a page for each module, and an index."""
    import pdoc

    for name in MODULES:
        module = importlib.import_module(name)
        vars(module).update(
            {public: getattr(module, public) for public in module.__all__}
        )  # pdoc sees no names that load on first use
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)
    return folder / "index.html"


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
