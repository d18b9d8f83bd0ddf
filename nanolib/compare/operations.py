"""Where a version changed what is measured itself: figures from either side pair, and there is no verdict on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nanolib.store import Store

UNTUNED_SINCE = (0, 3)
_WITH_MODELS = ("model", "energy", "warmup", "fp8")
WHY = "before 0.3, models multiplied in float32 on a CPU by oneDNN unasked; no verdict: measure the base again"


def versions_of(store: Store, run_ids: Iterable[str]) -> dict[str, str]:
    """The version of nanolib that made each run; empty where it is unknown."""
    return {run["run_id"]: str(run["versions"].get("nanolib", "")) for _, run in store.runs_of(run_ids).iterrows()}


def is_float32_model(experiment: str, factors: Mapping[str, Any]) -> bool:
    """Whether a case runs a whole model in float32 on a CPU, and not one that asks for `onednn`."""
    number_format = factors.get("dtype", factors.get("precision", "float32"))
    return (
        experiment in _WITH_MODELS
        and number_format == "float32"
        and factors.get("device") == "cpu"
        and factors.get("optimisation", "eager") != "onednn"
    )


def is_untuned(version: str) -> bool:
    """Whether this version of nanolib runs torch's own operations alone; one that is unknown does."""
    parts = version.split(".")[:2]
    return not all(part.isdecimal() for part in parts) or tuple(map(int, parts)) >= UNTUNED_SINCE
