"""Find the packages that nanolib needs but that are not installed.

This module imports only the standard library, so that a command can import it first.
"""

from importlib.util import find_spec

EVERYTHING, NOTEBOOKS, REPORTS, NVIDIA = "everything", "notebooks", "reports", "NVIDIA GPUs"
# Part of nanolib → packages that the part imports.
NEEDED_BY = {
    EVERYTHING: (
        "torch",
        "numpy",
        "pandas",
        "scipy",
        "ruptures",
        "pydantic",
        "yaml",
        "psutil",
        "filelock",
        "tqdm",
        "click",
    ),
    NOTEBOOKS: ("papermill", "nbclient", "nbformat", "ipykernel", "ipywidgets", "anywidget"),
    REPORTS: ("altair", "vl_convert", "PIL", "jinja2"),
    "FP8": ("torchao",),
    NVIDIA: ("pynvml",),
}


def missing() -> dict[str, list[str]]:
    """Return the missing packages of each incomplete part of nanolib."""
    found = {}
    for part, packages in NEEDED_BY.items():
        if gone := [package for package in packages if find_spec(package) is None]:
            found[part] = gone
    return found


def in_a_line(found: dict[str, list[str]], *, stops: bool) -> str:
    """Return a message about missing packages, in one line.

    Args:
        found: Missing packages of each part, from `missing`.
        stops: Whether the command cannot continue.
    """
    parts = "; ".join(
        f"{', '.join(packages)} (needed for {part})" for part, packages in found.items()
    )
    end = "nothing was run" if stops else "other parts of nanolib work"
    return f"not installed: {parts}; {end}; run `pip install -e .` in nanolib's folder"
