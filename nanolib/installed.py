"""Find packages of nanolib that are not installed, and the parts that need them.

This module imports none of them, so it works without them.
"""

from __future__ import annotations

from importlib.util import find_spec

EVERYTHING, NOTEBOOKS, REPORTS, NVIDIA = "everything", "notebooks", "reports", "NVIDIA GPUs"
# import name of a package → the part that needs it
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
    """Return part → its packages that are not installed."""
    found: dict[str, list[str]] = {}
    for package, part in NEEDED_BY.items():
        if find_spec(package) is None:
            found.setdefault(part, []).append(package)
    return found


def in_a_line(found: dict[str, list[str]], *, stops: bool) -> str:
    """Describe what is missing and what to do, in one line; empty if nothing is missing.

    Args:
        found: From `missing`.
        stops: Whether the command cannot run without it.
    """
    if not found:
        return ""
    parts = "; ".join(
        f"{', '.join(packages)} (needed for {part})" for part, packages in found.items()
    )
    end = "nothing was run" if stops else "the rest runs"
    return f"not installed: {parts}; {end}; run in nanolib's checkout: pip install -e ."
