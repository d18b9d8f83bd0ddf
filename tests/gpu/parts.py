"""The parts of the first minutes on a GPU, each with its checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pandas as pd

from nanolib.config import PRESETS
from nanolib.measurement import Flag, Unsupported
from nanolib.models import fp8
from nanolib.models.attention.tree import ALGORITHMS
from nanolib.run.ranks import RankFailed
from tests.gpu.checks import (
    Check,
    accident,
    errors_below,
    every_case,
    few,
    near,
    shares_below_peak,
)
from tests.gpu.hardware import Hardware

SLACK_MIB = 32  # what cuBLAS keeps for a stream: a thirtieth of the peaks that are compared
KERNELS = {"flash": "flash", "efficient": "fmha", "cudnn": "cudnn"}  # a part of their names
# of the SXM form: what others have measured at the least, and the datasheet's product without sparsity
H100 = {"bfloat16": (500e12, 990e12), "copy": (2.2e12, math.inf)}


def identity(gpu: Hardware) -> Iterator[Check]:
    """The sensors are those of the GPU that torch uses."""
    torchs, drivers = gpu.names()
    text = "the driver's GPU of torch's UUID has torch's name"
    yield Check(text, f"{torchs}; {drivers}", torchs == drivers)
    readings = gpu.busy(working=True)
    joules = readings["joules"][1] - readings["joules"][0]
    yield Check("the energy counter grows over 2 s of work", f"{joules:.0f} J", joules > 0)
    watts, power = joules / readings["t_s"][-1], float(np.mean(readings["watts"]))
    yield near("joules over seconds are the driver's watts within 20 %", watts, power, 0.2, "W")


def clock(gpu: Hardware) -> Iterator[Check]:
    """Times are those of the device, and say when they are not."""
    product = gpu.product("bfloat16")
    ours, theirs = gpu.measure(product).estimate, gpu.do_bench_ms(product)
    text = "a bfloat16 product of 8192³ takes what do_bench says within 3 %"
    yield near(text, ours, theirs, 0.03, "ms")
    small = gpu.measure(gpu.small())
    both = ", ".join(f"{name} {small.details.get(name)}" for name in ("host_ms", "device_ms"))
    text = "a kernel that does nothing is launch-bound"
    yield Check(text, both, Flag.LAUNCH_BOUND in small.flags)
    once, twice = (gpu.measure(gpu.sleep(cycles)).estimate for cycles in (10**7, 2 * 10**7))
    text = "twice the cycles of waiting read twice the time within 2 %"
    yield near(text, twice, 2 * once, 0.02, "ms")
    copy = gpu.copy(16)
    hot, cold = gpu.measure(copy).estimate, gpu.measure(copy, cold=True).estimate
    text = "a copy of 16 MiB takes longer with a cold cache"
    yield Check(text, f"{hot:.4g} and {cold:.4g} ms", cold > hot)


def ceilings(gpu: Hardware) -> Iterator[Check]:
    """The peak rates are those that others have measured."""
    rows = gpu.run("doctor", dtypes=["float32", "float16", "bfloat16"], **gpu.doctor)
    rows = rows[rows.metric.isin(["ceiling_flops", "ceiling_bytes"])]
    rates = dict(rows[["scope", "estimate"]].values)
    hopper = gpu.names()[0].startswith(("NVIDIA H100 80GB HBM3", "NVIDIA H200"))  # of the SXM form
    for scope, (least, most) in H100.items():
        unit = "TB/s" if scope == "copy" else "TFLOP/s"
        rate = float(rates.get(scope, math.nan))
        text = f"{scope} on an H100 or H200: {least / 1e12:g} to {most / 1e12:g} {unit}"
        yield Check(text, f"{rate / 1e12:.3g} {unit}", least <= rate <= most if hopper else None)

    def gain(slow: str, fast: str) -> float:
        slow_ms, fast_ms = (gpu.measure(gpu.product(kind)).estimate for kind in (slow, fast))
        return slow_ms / fast_ms

    faster = gain("float32", "tf32")
    yield Check("tf32 is more than 3 × as fast as float32", f"{faster:.2f} ×", faster > 3)
    text = "8 bits are more than 1.5 × as fast as bfloat16"
    if reason := fp8.native(gpu.device):
        yield Check(text, reason, None)
        return
    faster = gain("bfloat16", "fp8")
    yield Check(text, f"{faster:.2f} ×", faster > 1.5)


def attention(gpu: Hardware) -> Iterator[Check]:
    """The notebook's question at real lengths: dense backends, FlexAttention and sparse attention, forward and backward."""
    found = []
    for params in (*({**gpu.grid, "seq_lens": [n]} for n in gpu.grid["seq_lens"]), gpu.math):
        found.append(gpu.run("attention", **params))
        kinds = "dense (math)" if params is gpu.math else "all kinds"
        yield from every_case(f"attention, {kinds} at {params['seq_lens']}", found[-1])
    rows = pd.concat(found, ignore_index=True)
    text = "attention at real lengths against float64, in bfloat16"
    yield from errors_below(text, rows, "forward", 1e-2)
    yield from shares_below_peak("attention", rows)
    most = max(gpu.grid["seq_lens"])
    longest = rows[(rows.metric == "latency") & (rows["factor.seq_len"] == most)]
    for scope in ("forward", "backward"):
        times = longest[longest.scope == scope]
        dense = times[times["factor.name"].str.startswith("dense")].low.min()
        sparse = times[times["factor.name"] == "random s=0.9"].high.min()
        text = f"{scope}: random s=0.9 is faster than every dense backend at the longest length"
        yield Check(text, f"{sparse:.4g} and {dense:.4g} ms", bool(sparse < dense))


def patterns(gpu: Hardware) -> Iterator[Check]:
    """Every kind and pattern is right, and is the kernel it is called."""
    rows = gpu.run("attention", **gpu.patterns)
    yield from every_case("patterns", rows)
    yield from errors_below("every pattern against float64, in bfloat16", rows, "forward", 1e-2)
    for backend, part in KERNELS.items():
        try:
            names = gpu.kernels(gpu.attend(backend))
        except Unsupported as refused:
            names = [str(refused)]
        named = [name for name in names if part in name.lower()]
        text = f"dense ({backend}) launches a kernel named {part}"
        yield Check(text, few(named or names), bool(named))


def memory(gpu: Hardware) -> Iterator[Check]:
    """Peaks of a gibibyte and more are those of the plan, and running out of memory costs one case."""
    rows = [gpu.run("attention", **gpu.peaks), gpu.run("model", **gpu.training)]
    found = pd.concat(rows, ignore_index=True)
    peaks = found[found.metric == "peak_memory"].dropna(subset=["predicted", "estimate"])
    for row in peaks.to_dict("records"):
        name = row["factor.name"] if pd.isna(row["factor.preset"]) else row["factor.preset"]
        peak, plan = row["estimate"], row["predicted"]
        text = f"{name} {row['scope']}: the peak is the plan's within 5 % and {SLACK_MIB} MiB"
        away = abs(peak - plan) - 0.05 * plan
        yield Check(text, f"{peak:.4g} and {plan:.4g} MiB", bool(away <= SLACK_MIB))
    text = "peaks are planned, of attention and of training"
    yield Check(text, f"{len(peaks)} rows", {*peaks.scope} >= gpu.planned)
    before = gpu.reserved()
    yield from accident(gpu, "memory", "oom")
    after = gpu.reserved()
    text = "what was reserved is given back"
    yield Check(text, f"{before} and {after} bytes", after <= before + 2**25)


def models(gpu: Hardware) -> Iterator[Check]:
    """Whole models: compiled and captured ones give what the eager one gives, and a captured token is faster."""
    found = []
    for asked in (gpu.model, gpu.larger):
        found.append(gpu.run("model", **asked))
        yield from every_case(f"model {asked['presets'][0]}", found[-1])
    rows = pd.concat(found, ignore_index=True)
    yield from errors_below(
        "compiled and captured models against eager", rows, "against_eager", 2e-2
    )
    yield from shares_below_peak("model", rows)
    peaks = rows[(rows.metric == "peak_memory") & (rows.scope == "inference")]
    ratios = _beside_eager(peaks)
    text = "a captured forward pass holds no gradients: at most 1.5 × the eager peak"
    yield Check(text, _listed(ratios), bool(ratios and max(ratios) <= 1.5))
    ratios = _beside_eager(rows[(rows.metric == "latency") & (rows.scope == "decode")])
    text = "a token by a captured graph is faster than an eager one"
    yield Check(text, _listed(ratios), bool(ratios and max(ratios) < 1))


def _beside_eager(rows: pd.DataFrame) -> list[float]:
    """What a captured graph needs as a share of what eager needs, a value per model."""
    keys = ["factor.preset", "factor.optimization"]
    if not {*keys} <= {*rows.columns}:
        return []
    table = rows.groupby(keys).estimate.first().unstack()
    if not {"eager", "cuda_graph"} <= {*table.columns}:
        return []
    return list((table.cuda_graph / table.eager).dropna())


def _listed(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f} ×" for ratio in ratios) or "no such rows"


def eight_bits(gpu: Hardware) -> Iterator[Check]:
    """Training in 8 bits at several widths, and every recipe once, forward and training."""
    reason = fp8.native(gpu.device) or ("" if find_spec("torchao") else "torchao is not installed")
    if reason:
        yield Check("all recipes compute in 8 bits", reason, None)
        return
    gains = {}
    for params in gpu.fp8_sizes:
        (preset,) = params["presets"]
        rows = gpu.run("fp8", **params)
        yield from every_case(f"fp8 {preset}", rows)
        steps = rows[(rows.metric == "latency") & (rows.scope == "training_step")]
        times = steps.groupby("factor.precision").estimate.first()
        gain = times.get("bfloat16", math.nan) / times.drop("bfloat16", errors="ignore").min()
        gains[PRESETS[preset]["d_model"]] = gain
        text = f"fp8 {preset}: a step in bfloat16 over one in 8 bits is known"
        yield Check(text, f"{gain:.2f} ×", bool(gain > 0))
    widest, gain = max(gains.items())
    text = "training in 8 bits is faster than in bfloat16 at the largest width"
    yield Check(text, f"{gain:.2f} × at a width of {widest}", bool(gain > 1))
    recipes = {
        "precisions": ["bfloat16", *(f"fp8_{name}" for name in fp8.RECIPES)],
        "modes": ["forward", "training_step"],
    }
    yield from every_case("fp8 recipes", gpu.run("fp8", **gpu.fp8, **recipes))
    names = gpu.kernels(gpu.convert())
    eight = [name for name in names if any(part in name.lower() for part in ("e4m3", "fp8", "f8"))]
    yield Check("a converted layer launches a kernel of 8 bits", few(eight or names), bool(eight))


def energy(gpu: Hardware) -> Iterator[Check]:
    """Counter and power agree, and an idle GPU is flat."""
    rows = gpu.run("energy", **gpu.energy)
    yield from every_case("energy", rows)
    readings = gpu.busy(working=True)
    t_s, watts = np.asarray(readings["t_s"]), np.asarray(readings["watts"])
    counted, integrated = (
        readings["joules"][1] - readings["joules"][0],
        float(np.trapezoid(watts, t_s)),
    )
    text = "the counter's joules are those of the power samples within 5 %"
    yield near(text, counted, integrated, 0.05, "J")
    idle = np.asarray(gpu.busy(working=False)["watts"])
    half = idle[len(idle) // 2 :]  # it cools down from what was before
    spread = float(half.std() / half.mean())
    text = "two idle seconds are flat within 10 %"
    yield Check(text, f"{half.mean():.0f} W ± {spread:.1%}", spread <= 0.1)


def ranks(gpu: Hardware) -> Iterator[Check]:
    """Every algorithm is right on one rank and on all, and the rank that hangs is named."""
    params = {
        "algorithms": list(ALGORITHMS),
        "prefill_algorithms": ["ring", "zigzag", "ulysses"],
        "backward": True,
        "world_sizes": sorted({1, gpu.count()}),
        "memory_seq_lens": [],
    }
    rows = gpu.run("distributed", **params, **gpu.ranks)
    yield from every_case("distributed", rows)
    for scope in sorted({*rows[rows.metric == "relative_error"].scope}):
        yield from errors_below(f"{scope} against float64", rows, scope, 1e-2)
    peaks = rows[rows.metric == "peak_memory"].groupby("scope").estimate.max()
    ring, dense = (float(peaks.get(f"{name} training", math.nan)) for name in ("ring", "dense"))
    several = gpu.count() > 1
    text, found = (
        "a ring's training holds less than twice one rank's",
        f"{ring:.4g} and {dense:.4g} MiB",
    )
    yield Check(text, found, ring < 2 * dense if several else None)
    found, holds = "one GPU: NCCL wants one for each rank", None
    if several:
        try:
            gpu.hang()
            found, holds = "it did not hang", False
        except RankFailed as failed:
            found, holds = str(failed), "rank 1 of 2 did not join a collective" in str(failed)
    yield Check("a rank that hangs is named", found, holds)


def lost(gpu: Hardware) -> Iterator[Check]:
    """After a device assert the next case is measured all the same."""
    # the last part, since this process has no GPU after it
    yield from accident(gpu, "assert", "error")


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        checks: What it asks of the GPU.
        limit_s: After so many seconds it is stopped; what it has shown until then stays.
        compiles: The experiment and the parameters whose kernels are compiled ahead of it, on all cores.
    """

    checks: Callable[[Hardware], Iterator[Check]]
    limit_s: float
    compiles: Callable[[type[Hardware]], list[tuple[str, dict[str, Any]]]] = lambda hardware: []


# By worth: if the time is cut short, the first ones have run.
PARTS: dict[str, Part] = {
    "identity": Part(identity, 20),
    "clock": Part(clock, 30),
    "ceilings": Part(ceilings, 40),
    "attention": Part(attention, 150, lambda hardware: [("attention", hardware.grid)]),
    "models": Part(models, 120),
    "fp8": Part(eight_bits, 180, lambda hardware: [("fp8", asked) for asked in hardware.fp8_sizes]),
    "energy": Part(energy, 40),
    "memory": Part(memory, 60, lambda hardware: [("attention", hardware.peaks)]),
    "patterns": Part(patterns, 110, lambda hardware: [("attention", hardware.patterns)]),
    "ranks": Part(ranks, 60),
    "lost device": Part(lost, 30),
}
