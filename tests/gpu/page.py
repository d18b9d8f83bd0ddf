"""Write docs/gpu.md, the list of tests on each GPU, from outputs/reference/gpu: `python -m tests.gpu.page`."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs" / "gpu.md", ROOT / "outputs" / "reference" / "gpu"

# What is asked of the hardware, and by which tests it is walked without any.
PATHS = {
    "identity": "sensors of the tested GPU: stubs of 8 GPUs (`tests/gpu/test_paths.py`)",
    "clock": "events, host and device times, warm-up, cold cache, clocks: a simulated stream"
    " (`tests/gpu/test_timing.py`)",
    "ceilings": "matrix products and copies: the same code on a CPU (`tests/meters`)",
    "attention": "every attention and pattern on a CPU (`tests/run/test_walk.py`), masks and"
    " gradients with FlexAttention's math path (`tests/models/test_flex.py`)",
    "patterns": "each pattern once on a CPU, forward and backward (`tests/models`)",
    "memory": "plans on a CPU (`tests/meters`), out of memory and reserved memory: stubs"
    " (`tests/gpu/test_paths.py`)",
    "models": "compilation and generation on a CPU (`tests/models`), captured graphs: stubs"
    " (`tests/gpu/test_paths.py`)",
    "fp8": "torchao's recipes, emulated (`tests/models/test_fp8.py`)",
    "energy": "counters, power, gaps, wrap-around: stubs and recorded traces"
    " (`tests/meters/test_integration.py`, `test_power.py`)",
    "ranks": "all algorithms over gloo on CPUs (`tests/models/test_ranks.py`)",
    "lost device": "new processes for the cases after a lost device: stubs"
    " (`tests/run/test_groups.py`)",
}
OTHERS = {
    "AMD (ROCm)": "energy with amdsmi on stubs (`tests/meters/test_sensors.py`). nanolib rejects"
    " FP8 on ROCm until FP8 is tested.",
    "Apple (MPS)": "energy with IOReport on stubs (`tests/meters/test_sensors.py`). MPS has no float64.",
}


def markdown(results):
    """Return the text of docs/gpu.md: what is tested on which GPU, and how the rest is tested."""
    lines = [
        "# GPU status",
        "",
        "`make gpu` checks every GPU code path on an NVIDIA GPU in at most nine minutes. Each line of"
        " the output is one check, and a failing part does not stop the other parts. Without a GPU,"
        " `tests/benchmarks/gpu_rehearsal.py` runs all parts on a stand-in for CUDA that computes"
        " nothing. `python -m tests.gpu.page` writes this page from `outputs/reference/gpu`.",
        "",
    ]
    lines += [f"- **{one['gpu']}**, torch {one['torch']}, {one['date']}" for one in results]
    lines += ["", "| part | passed on | tests without a GPU |", "|---|---|---|"]
    for name, covered in PATHS.items():
        states = [
            _state(result["gpu"], part)
            for result in results
            for part in result["parts"]
            if part["name"] == name
        ]
        lines.append(f"| {name} | {'; '.join(states) or 'no GPU yet'} | {covered} |")
    lines += [f"| {name} | no device yet | {covered} |" for name, covered in OTHERS.items()]
    return "\n".join(lines) + "\n"


def _state(gpu, part):
    holds = [check["holds"] for check in part["checks"]]
    text = f"{gpu}: {holds.count(True)} of {len(holds) - holds.count(None)} checks"
    text += f", {holds.count(None)} need other hardware" if None in holds else ""
    return f"{text}; the part did not finish ({part['broke']})" if part["broke"] else text


def results():
    """Those that are kept, by name."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*/*.json"))]


if __name__ == "__main__":
    DOCS.write_text(markdown(results()))
