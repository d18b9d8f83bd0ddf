"""Find the packages that nanolib needs and that are not installed.

This module imports only the standard library, so that a command can call it first.
"""

from __future__ import annotations

from importlib.util import find_spec

EVERYTHING, NOTEBOOKS, REPORTS, NVIDIA = "everything", "notebooks", "reports", "NVIDIA GPUs"
# Package, by its name in an import → the part that needs it.
NEEDED_BY = {
    **dict.fromkeys(("torch", "numpy", "pandas", "scipy", "ruptures", "pydantic"), EVERYTHING),
    **dict.fromkeys(("yaml", "psutil", "filelock", "tqdm", "click"), EVERYTHING),
    **dict.fromkeys(
        ("papermill", "nbclient", "nbformat", "ipykernel", "ipywidgets", "anywidget"), NOTEBOOKS
    ),
    **dict.fromkeys(("altair", "vl_convert", "PIL", "jinja2"), REPORTS),
    "torchao": "FP8",
    "pynvml": NVIDIA,
}


def missing() -> dict[str, list[str]]:
    """Return each part of nanolib that cannot run → the packages that it needs."""
    found: dict[str, list[str]] = {}
    for package, part in NEEDED_BY.items():
        if find_spec(package) is None:
            found.setdefault(part, []).append(package)
    return found


def in_a_line(found: dict[str, list[str]], *, stops: bool) -> str:
    """Return a line about missing packages and what to do; empty if none is missing.

    Args:
        found: As `missing` gives it.
        stops: Whether the command cannot go on.
    """
    if not found:
        return ""
    parts = "; ".join(
        f"{', '.join(packages)} (needed for {part})" for part, packages in found.items()
    )
    end = "nothing was run" if stops else "the rest runs"
    return f"not installed: {parts}; {end}; run: pip install -e . in nanolib's folder"
