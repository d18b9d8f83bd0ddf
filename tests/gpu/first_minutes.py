"""The first ten minutes on a GPU: what nanolib does there, held against what must come out. `make gpu`.

Every line is an assertion. A part that fails, or breaks, is written down, and the next one begins. Results go to `outputs/gpu/`:
`NAME.json`, and a page that is made from it. Exit code 0 when all holds, 1 when something does not, 2 without a GPU.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from nanolib.measurement import Flag
from nanolib.models import fp8
from nanolib.models.attention.choice import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.tree import ALGORITHMS
from nanolib.paths import output_folder
from nanolib.run.ranks.ranks import RankFailed
from tests.gpu import page
from tests.gpu.hardware import Hardware

WORKSPACE_MIB = 64  # what cuBLAS keeps beside a case's own tensors
KERNELS = {"flash": "flash", "efficient": "fmha", "cudnn": "cudnn"}  # a part of their names
H100 = {"bfloat16": (500e12, 800e12), "copy": (2.2e12, math.inf)}  # of the SXM form, what others have measured


@dataclass(frozen=True)
class Check:
    """One assertion.

    Attributes:
        text: What must hold.
        found: What was found.
        holds: Whether it does; None where this machine cannot show it.
    """

    text: str
    found: str
    holds: bool | None


def identity(gpu: Hardware) -> Iterator[Check]:
    """The sensors are those of the GPU that torch uses."""
    torchs, drivers = gpu.names()
    yield Check("the driver's GPU of torch's UUID has torch's name", f"{torchs}; {drivers}", torchs == drivers)
    told = gpu.busy(working=True)
    joules = told["joules"][1] - told["joules"][0]
    yield Check("the energy counter grows over 2 s of work", f"{joules:.0f} J", joules > 0)
    watts, power = joules / told["t_s"][-1], float(np.mean(told["watts"]))
    yield _near("joules over seconds are the driver's watts within 20 %", watts, power, 0.2, "W")


def clock(gpu: Hardware) -> Iterator[Check]:
    """Times are those of the device, and say when they are not."""
    product = gpu.product("bfloat16")
    ours, theirs = gpu.measure(product).estimate, gpu.do_bench_ms(product)
    yield _near("a bfloat16 product of 8192³ takes what do_bench says within 3 %", ours, theirs, 0.03, "ms")
    small = gpu.measure(gpu.small())
    both = ", ".join(f"{name} {small.details.get(name)}" for name in ("host_ms", "device_ms"))
    yield Check("a kernel that does nothing is launch-bound", both, Flag.LAUNCH_BOUND in small.flags)
    once, twice = (gpu.measure(gpu.sleep(cycles)).estimate for cycles in (10**7, 2 * 10**7))
    yield _near("twice the cycles of waiting read twice the time within 2 %", twice, 2 * once, 0.02, "ms")
    copy = gpu.copy(16)
    hot, cold = gpu.measure(copy).estimate, gpu.measure(copy, cold=True).estimate
    yield Check("a copy of 16 MiB takes longer with a cold cache", f"{hot:.4g} and {cold:.4g} ms", cold > hot)


def ceilings(gpu: Hardware) -> Iterator[Check]:
    """What the machine reaches is what others have measured."""
    rows = gpu.run("doctor", dtypes=["float32", "bfloat16"], **gpu.doctor)
    found = dict(rows[rows.metric.isin(["ceiling_flops", "ceiling_bytes"])][["scope", "estimate"]].values)
    hopper = "H100" in gpu.names()[0] or "H200" in gpu.names()[0]
    for scope, (least, most) in H100.items():
        unit = "TB/s" if scope == "copy" else "TFLOP/s"
        ends = f"at least {least / 1e12:g}" if math.isinf(most) else f"{least / 1e12:g} to {most / 1e12:g}"
        text = f"{scope} on an H100 or H200: {ends} {unit}"
        yield Check(text, f"{found[scope] / 1e12:.3g} {unit}", least <= found[scope] <= most if hopper else None)
    seconds = {kind: gpu.measure(gpu.product(kind)).estimate for kind in ("float32", "tf32", "bfloat16")}
    gain = seconds["float32"] / seconds["tf32"]
    yield Check("tf32 is more than 3 × as fast as float32", f"{gain:.2f} ×", gain > 3)
    if reason := fp8.native(gpu.device):
        yield Check("8 bits are more than 1.5 × as fast as bfloat16", reason, None)
        return
    gain = seconds["bfloat16"] / gpu.measure(gpu.product("fp8")).estimate
    yield Check("8 bits are more than 1.5 × as fast as bfloat16", f"{gain:.2f} ×", gain > 1.5)


def attention(gpu: Hardware) -> Iterator[Check]:
    """Every kind is right, is the kernel it is called, and skips what it claims to."""
    kinds = [{"kind": "dense", "backend": name} for name in ("math", *KERNELS)]
    kinds += [{"kind": "flash_attn"}, {"kind": "flex", "pattern": "window", "window": 256}]
    kinds += [{"kind": "sparse", "pattern": name} for name in (*PATTERNS, *CHOOSERS)]
    asked = {"attention_types": kinds, "dtypes": ["bfloat16"], "quality_patterns": [], "backward": True}
    rows = gpu.run("attention", **asked, **gpu.attention)
    yield from _every_case("attention", rows)
    yield from _errors("attention against float64, in bfloat16", rows, "forward", 1e-2)
    yield from _shares("attention", rows)
    for backend, part in KERNELS.items():
        names = gpu.kernels(gpu.attend(backend))
        yield Check(
            f"dense ({backend}) launches a kernel named {part}",
            _few(names),
            any(part in name.lower() for name in names),
        )
    ratio = _after_twelve_shapes(gpu)
    yield Check("FlexAttention after 12 lengths is within 10 % of a fresh one", f"{ratio:.3f} ×", abs(ratio - 1) <= 0.1)
    pair = [{"kind": "dense", "backend": "flash"}, {"kind": "sparse", "pattern": "window", "window": 256}]
    rows = gpu.run("attention", **asked | gpu.attention | {"attention_types": pair, "seq_lens": [gpu.long]})
    times = rows[(rows.metric == "latency") & (rows.scope == "forward")].set_index("factor.name")
    dense, sparse = times.loc["dense (flash)"], times.loc["window 256"]
    text = f"a window of 256 is faster than flash at {gpu.long}"
    yield Check(text, f"{sparse.estimate:.4g} and {dense.estimate:.4g} ms", bool(sparse.high < dense.low))


def _after_twelve_shapes(gpu: Hardware) -> float:
    gpu.forget_compiled()
    call = gpu.flex(gpu.long)
    fresh = gpu.measure(call).estimate
    gpu.forget_compiled()
    for at in range(1, 13):
        gpu.flex(at * gpu.long // 12)()
    return gpu.measure(gpu.flex(gpu.long)).estimate / fresh


def memory(gpu: Hardware) -> Iterator[Check]:
    """Peaks are those of the plan, and running out of memory costs one case."""
    kinds = [{"kind": "dense", "backend": "flash"}, {"kind": "sparse", "pattern": "window", "window": 256}]
    asked = {"attention_types": kinds, "dtypes": ["bfloat16"], "quality_patterns": []}
    rows = gpu.run("attention", **asked, **gpu.attention)
    peaks = rows[(rows.metric == "peak_memory") & rows.predicted.notna() & rows.estimate.notna()]
    for _, row in peaks.iterrows():
        beyond = row.estimate - 1.05 * row.predicted
        text = f"{row['factor.name']} {row.scope}: the peak is the plan's within 5 % and {WORKSPACE_MIB} MiB"
        fits = row.estimate >= 0.95 * row.predicted and beyond <= WORKSPACE_MIB
        yield Check(text, f"{row.estimate:.4g} beside {row.predicted:.4g} MiB", bool(fits))
    yield Check("peaks are planned", f"{len(peaks)} rows", len(peaks) > 0)
    before = gpu.reserved()
    yield from _accident(gpu, "memory", "oom")
    after = gpu.reserved()
    yield Check("what was reserved is given back", f"{before} and {after} bytes", after <= before + 2**25)


def models(gpu: Hardware) -> Iterator[Check]:
    """Compiled and captured models give what the eager one gives."""
    asked = {
        "optimisations": ["eager", "compile", "cuda_graph"],
        "dtypes": ["bfloat16"],
        "loss_steps": 0,
        "new_tokens": 32,
    }
    rows = gpu.run("model", **asked, **gpu.model)
    yield from _every_case("model", rows)
    yield from _errors("compiled and captured models against eager", rows, "against_eager", 2e-2)
    yield from _shares("model", rows)
    peaks = rows[(rows.metric == "peak_memory") & (rows.scope == "inference")].set_index("factor.optimisation").estimate
    graph, eager = (float(peaks.get(name, math.nan)) for name in ("cuda_graph", "eager"))
    text = "a captured forward pass holds no gradients: at most 1.5 × the eager peak"
    yield Check(text, f"{graph:.4g} and {eager:.4g} MiB", graph <= 1.5 * eager)
    decoded = {*rows[(rows.metric == "latency") & (rows.scope == "decode")]["factor.optimisation"]}
    yield Check("decoding is recorded, eager and by graphs", str(sorted(decoded)), {"eager", "cuda_graph"} <= decoded)


def eight_bits(gpu: Hardware) -> Iterator[Check]:
    """Every recipe computes, forward and training, in 8 bits."""
    if reason := fp8.native(gpu.device):
        yield Check("all recipes compute in 8 bits", reason, None)
        return
    asked = {
        "precisions": ["bfloat16", *(f"fp8_{name}" for name in fp8.RECIPES)],
        "modes": ["forward", "training_step"],
    }
    rows = gpu.run("fp8", **asked, parity_arms=[], numerics=[], quoted=False, **gpu.fp8)
    yield from _every_case("fp8", rows)
    names = gpu.kernels(gpu.convert())
    eight = [name for name in names if any(part in name.lower() for part in ("e4m3", "fp8", "f8"))]
    yield Check("a converted layer launches a kernel of 8 bits", _few(names), bool(eight))


def energy(gpu: Hardware) -> Iterator[Check]:
    """Counter and power agree, and an idle GPU is flat."""
    told = gpu.busy(working=True)
    t_s, watts = np.asarray(told["t_s"]), np.asarray(told["watts"])
    counted, integrated = told["joules"][1] - told["joules"][0], float(np.trapezoid(watts, t_s))
    yield _near("the counter's joules are those of the power samples within 5 %", counted, integrated, 0.05, "J")
    idle = np.asarray(gpu.busy(working=False)["watts"])
    half = idle[len(idle) // 2 :]  # it cools down from what was before
    spread = float(half.std() / half.mean())
    yield Check("two idle seconds are flat within 10 %", f"{half.mean():.0f} W ± {spread:.1%}", spread <= 0.1)


def ranks(gpu: Hardware) -> Iterator[Check]:
    """Every algorithm is right on one rank and on all, and the rank that hangs is named."""
    asked = {"algorithms": list(ALGORITHMS), "prefill_algorithms": ["ring", "zigzag", "ulysses"], "backward": True}
    worlds = sorted({1, gpu.count()})
    rows = gpu.run("distributed", world_sizes=worlds, memory_seq_lens=[], training_preset="", **asked, **gpu.ranks)
    yield from _every_case("distributed", rows)
    for scope in sorted({*rows[rows.metric == "relative_error"].scope}):
        yield from _errors(f"{scope} against float64", rows, scope, 1e-2)
    peaks = rows[rows.metric == "peak_memory"].groupby("scope").estimate.max()
    ring, dense = (float(peaks.get(f"{name} training", math.nan)) for name in ("ring", "dense"))
    text = "a ring's training holds less than twice one rank's"
    yield Check(text, f"{ring:.4g} and {dense:.4g} MiB", ring < 2 * dense if gpu.count() > 1 else None)
    if gpu.count() < 2:
        yield Check("a rank that hangs is named", "one GPU: NCCL wants one for each rank", None)
        return
    try:
        gpu.hang()
    except RankFailed as failed:
        yield Check("a rank that hangs is named", str(failed), "rank 1 of 2 let the others wait" in str(failed))
    else:
        yield Check("a rank that hangs is named", "it did not hang", False)


def lost(gpu: Hardware) -> Iterator[Check]:
    """After a device assert the next case is measured all the same.

    The last part, since this process has no GPU after it.
    """
    yield from _accident(gpu, "assert", "error")


PARTS: dict[str, Callable[[Hardware], Iterator[Check]]] = {
    "identity": identity,
    "clock": clock,
    "ceilings": ceilings,
    "attention": attention,
    "memory": memory,
    "models": models,
    "fp8": eight_bits,
    "energy": energy,
    "ranks": ranks,
    "lost device": lost,
}


def _near(text: str, found: float, wanted: float, share: float, unit: str) -> Check:
    return Check(text, f"{found:.4g} and {wanted:.4g} {unit}", abs(found - wanted) <= share * abs(wanted))


def _few(names: list[str]) -> str:
    return ", ".join(sorted(name[:60] for name in names)[:4]) or "none"


def _every_case(name: str, rows: pd.DataFrame) -> Iterator[Check]:
    ends = rows[rows.metric == "case_time"]
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    said = "; ".join(f"{row.factors} {row.status}: {row.message}" for row in wrong.itertuples()) or f"{len(ends)} cases"
    holds = wrong.empty and (ends.status == "ok").any()
    yield Check(f"{name}: every case runs, or says why it cannot", said[:1000], bool(holds))


def _errors(text: str, rows: pd.DataFrame, scope: str, most: float) -> Iterator[Check]:
    errors = rows[(rows.metric == "relative_error") & (rows.scope == scope)].estimate
    found = f"at most {errors.max():.2g} in {len(errors)} rows"
    yield Check(f"{text}: the error is under {most:g}", found, bool(len(errors) and (errors < most).all()))


def _shares(name: str, rows: pd.DataFrame) -> Iterator[Check]:
    shares = rows[rows.metric == "ceiling_share"].estimate
    found = f"at most {shares.max():.3f} in {len(shares)} rows"
    yield Check(f"{name}: no share of a ceiling is above 1.05", found, bool(len(shares) and (shares <= 1.05).all()))


def _accident(gpu: Hardware, accident: str, status: str) -> Iterator[Check]:
    rows = gpu.run("accidents", accidents=[accident, "none"])
    ends = list(rows[rows.metric == "case_time"].status)
    yield Check(f"{accident}: the case is {status} and the next one ok", ", ".join(ends), ends == [status, "ok"])


def first_minutes(gpu: Hardware) -> dict[str, Any]:
    """All parts, each going on where another broke.

    Returns:
        JSON types: `gpu`, `torch`, `date`, and `parts`: name, seconds, checks, and what broke it.
    """
    parts = []
    for name, part in PARTS.items():
        start, checks, broke = time.perf_counter(), [], ""
        try:
            for check in part(gpu):
                checks.append(asdict(check))
                print(f"{name}: {_MARKS[check.holds]} {check.text}: {check.found}", flush=True)
        except Exception as error:  # whatever a part meets is its result, and the next one begins
            broke = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            print(f"{name}: broke: {broke}", flush=True)
        parts.append({"name": name, "seconds": round(time.perf_counter() - start, 1), "checks": checks, "broke": broke})
    date = datetime.now(UTC).date().isoformat()
    return {"gpu": gpu.names()[0], "torch": torch.__version__, "date": date, "parts": parts}


_MARKS = {True: "holds", False: "DOES NOT HOLD", None: "not shown here"}


def all_holds(found: dict[str, Any]) -> bool:
    """Whether no part broke, and no check fails."""
    return not any(part["broke"] or any(c["holds"] is False for c in part["checks"]) for part in found["parts"])


def main(folder: Path | None = None, hardware: Callable[[], Hardware] = Hardware) -> int:
    """Run all parts and write them; see the module."""
    if not torch.cuda.is_available():
        print("make gpu: torch sees no NVIDIA GPU here, so nothing was run. On one it would show:", file=sys.stderr)
        for name, part in PARTS.items():
            print(f"  {name}: {(part.__doc__ or '').splitlines()[0]}", file=sys.stderr)
        return 2
    found = first_minutes(hardware())
    folder = folder or output_folder() / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in found["gpu"].lower())
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / f"{name}.html").write_text(page.html(found))
    print(f"written to {folder / name}.json and .html; {'all holds' if all_holds(found) else 'not all holds'}")
    return 0 if all_holds(found) else 1


if __name__ == "__main__":
    sys.exit(main())
