"""Write docs/gpu.md, which says what has been tested on which GPU: `python -m tests.gpu.page`, from outputs/reference/gpu."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs" / "gpu.md", ROOT / "outputs" / "reference" / "gpu"

# What is asked of the hardware, and by which tests it is walked without any.
PATHS = {
    "identity": "the driver's sensors belong to the GPU under test: stubs of 8 GPUs (`tests/gpu/test_paths.py`)",
    "clock": "events, host and device times, warm-up, cold cache, clocks: a simulated stream (`tests/gpu/test_timing.py`)",
    "ceilings": "products and copies as yardsticks: the same code on a CPU (`tests/meters`)",
    "attention": "every kind and pattern on a CPU (`tests/run/test_walk.py`), masks and gradients by"
    " FlexAttention's math path (`tests/models/test_flex.py`)",
    "patterns": "each pattern once on a CPU, forward and backward (`tests/models`)",
    "memory": "plans on a CPU (`tests/meters`); out of memory, and what is left in reserve: stubs (`tests/gpu/test_paths.py`)",
    "models": "compile and generation on a CPU (`tests/models`); captured graphs: stubs (`tests/gpu/test_paths.py`)",
    "fp8": "torchao's recipes, emulated (`tests/models/test_fp8.py`)",
    "energy": "counters, power, gaps, wraps: stubs and recorded traces (`tests/meters/test_integration.py`, `test_power.py`)",
    "ranks": "all algorithms over gloo, for real (`tests/models/test_ranks.py`)",
    "lost device": "the cases after a device assert get processes of their own: stubs (`tests/gpu/test_paths.py`)",
}
OTHERS = {
    "AMD (ROCm)": "energy by amdsmi on stubs (`tests/meters/test_sensors.py`); FP8 is refused until it was seen",
    "Apple (MPS)": "energy by IOReport on stubs (`tests/meters/test_sensors.py`); timing waits for the device; no float64",
}


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The text of docs/gpu.md: which paths were seen on which GPU, and which on simulated devices alone."""
    lines = [
        "# What has been seen on which GPU",
        "",
        "Made by `python -m tests.gpu.page` from what `make gpu` wrote on each machine (`outputs/reference/gpu`)."
        " `make gpu` takes at most nine minutes; each of its lines is an assertion, and a part that fails stops no other."
        " Without a GPU, `tests/benchmarks/gpu_rehearsal.py` runs all parts on a stand-in for CUDA that computes nothing.",
        "",
    ]
    if results:
        lines += [f"- **{one['gpu']}**, torch {one['torch']}, {one['date']}" for one in results]
    else:
        lines.append(
            "**No path of nanolib has been seen on a GPU yet.** All of them are walked on simulated devices alone."
        )
    lines += ["", "| path | seen on | walked without a GPU |", "|---|---|---|"]
    for name, walked in PATHS.items():
        seen = [
            _state(one, name)
            for one in results
            if any(part["name"] == name for part in one["parts"])
        ]
        lines.append(f"| {name} | {'; '.join(seen) or 'not yet seen on a GPU'} | {walked} |")
    lines += [f"| {name} | not yet seen on one | {walked} |" for name, walked in OTHERS.items()]
    return "\n".join(lines) + "\n"


def _state(result: dict[str, Any], name: str) -> str:
    part = next(part for part in result["parts"] if part["name"] == name)
    holds = [check["holds"] for check in part["checks"]]
    text = f"{result['gpu']}: {holds.count(True)} of {len(holds) - holds.count(None)} hold"
    text += f", {holds.count(None)} need more than it has" if None in holds else ""
    return f"{text}; then it ended ({part['broke']})" if part["broke"] else text


def results() -> list[dict[str, Any]]:
    """Those that are kept, by name."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*/*.json"))]


if __name__ == "__main__":
    DOCS.write_text(markdown(results()))
