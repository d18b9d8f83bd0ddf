"""Where a version changed what is measured itself: figures from either side pair, and there is no verdict on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nanolib.store import Store
from nanolib.store.schema import DURING

UNTUNED_SINCE = (0, 3)
_WITH_MODELS = ("model", "energy", "warmup", "fp8")
WHY = "before 0.3, models in float32 on a CPU could multiply by oneDNN unasked; no verdict: measure the base again"


def noise_of(store: Store, run_ids: Iterable[str]) -> dict[str, list[str]]:
    """What the noise checks of each run found when it began; runs on a quiet machine are left out.

    What came while cases were measured is left out too: the rows that it met carry a flag of their own.
    """
    found = {
        run["run_id"]: [line for line in run["disturbances"] if not line.startswith(DURING)]
        for _, run in store.runs_of(run_ids).iterrows()
    }
    return {run_id: lines for run_id, lines in found.items() if lines}


def versions_of(store: Store, run_ids: Iterable[str]) -> dict[str, str]:
    """The version of nanolib that made each run; empty where it is unknown."""
    return {run["run_id"]: str(run["versions"].get("nanolib", "")) for _, run in store.runs_of(run_ids).iterrows()}


def is_float32_model(experiment: str, factors: Mapping[str, Any]) -> bool:
    """Whether a case runs one of nanolib's models in float32 on a CPU as torch would: forward, eagerly, not training."""
    number_format = factors.get("dtype", factors.get("precision", "float32"))
    # a ceiling, a product, a loss: none of these
    does = factors.get("mode", factors.get("phase", factors.get("direction", "")))
    return (
        experiment in _WITH_MODELS
        and number_format == "float32"
        and factors.get("device") == "cpu"
        and does in ("inference", "generation", "prefill", "decode", "forward")
        and factors.get("optimisation", "eager") == "eager"
        and factors.get("attention_type") != "own"
        and not factors.get("compiled")
    )


def is_untuned(version: str) -> bool:
    """Whether this version of nanolib runs torch's own operations alone; one that is unknown does."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is None or (int(found[1]), int(found[2])) >= UNTUNED_SINCE
