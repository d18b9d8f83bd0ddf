"""The API page, from the docstrings: python -m docs.api FOLDER."""

import importlib
import sys
from pathlib import Path

MODULES = (  # whose `__all__` is what a notebook or a script of one's own may call
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
    """Write a page per module, and one that lists them."""
    import pdoc

    for name in MODULES:
        module = importlib.import_module(name)
        vars(module).update(
            {public: getattr(module, public) for public in module.__all__}
        )  # those that load late
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)
    return folder / "index.html"


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
