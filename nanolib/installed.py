"""Which of the packages that nanolib needs are not installed, and what goes without each.

It imports nothing that could be missing, so that it can be asked first.
"""

from __future__ import annotations

from importlib.util import find_spec

EVERYTHING, NOTEBOOKS, REPORTS, NVIDIA = "everything", "notebooks", "reports", "NVIDIA GPUs"
# package, as it is imported → what needs it
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
    """What goes without → the packages that it would need."""
    found: dict[str, list[str]] = {}
    for package, part in NEEDED_BY.items():
        if find_spec(package) is None:
            found.setdefault(part, []).append(package)
    return found


def in_a_line(found: dict[str, list[str]], *, stops: bool) -> str:
    """What is missing and what to do, for a reader; empty where nothing is.

    Args:
        found: As `missing` gives it.
        stops: Whether nothing can be done without it.
    """
    if not found:
        return ""
    parts = "; ".join(
        f"{', '.join(packages)} (needed for {part})" for part, packages in found.items()
    )
    end = "nothing was run" if stops else "the rest runs"
    return f"not installed: {parts}; {end}; run: pip install -e . in nanolib's folder"
