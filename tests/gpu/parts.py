"""The parts of the first minutes on a GPU, and what must come out of each: every check is an assertion that can fail."""

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
from nanolib.run.rank import RankFailed
from tests.gpu.hardware import Hardware

SLACK_MIB = 32  # what cuBLAS keeps for a stream: a thirtieth of the peaks that are compared
KERNELS = {"flash": "flash", "efficient": "fmha", "cudnn": "cudnn"}  # a part of their names
# of the SXM form: what others have measured at the least, and the datasheet's product without sparsity
H100 = {"bfloat16": (500e12, 990e12), "copy": (2.2e12, math.inf)}
LOSSES = {
    "memory": ("out of memory", "allocate"),
    "assert": ("device-side assert",),
}  # of a GPU, and of a CPU in tests


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
    yield Check(
        "the driver's GPU of torch's UUID has torch's name",
        f"{torchs}; {drivers}",
        torchs == drivers,
    )
    told = gpu.busy(working=True)
    joules = told["joules"][1] - told["joules"][0]
    yield Check("the energy counter grows over 2 s of work", f"{joules:.0f} J", joules > 0)
    watts, power = joules / told["t_s"][-1], float(np.mean(told["watts"]))
    yield _near("joules over seconds are the driver's watts within 20 %", watts, power, 0.2, "W")


def clock(gpu: Hardware) -> Iterator[Check]:
    """Times are those of the device, and say when they are not."""
    product = gpu.product("bfloat16")
    ours, theirs = gpu.measure(product).estimate, gpu.do_bench_ms(product)
    yield _near(
        "a bfloat16 product of 8192³ takes what do_bench says within 3 %", ours, theirs, 0.03, "ms"
    )
    small = gpu.measure(gpu.small())
    both = ", ".join(f"{name} {small.details.get(name)}" for name in ("host_ms", "device_ms"))
    yield Check(
        "a kernel that does nothing is launch-bound", both, Flag.LAUNCH_BOUND in small.flags
    )
    once, twice = (gpu.measure(gpu.sleep(cycles)).estimate for cycles in (10**7, 2 * 10**7))
    yield _near(
        "twice the cycles of waiting read twice the time within 2 %", twice, 2 * once, 0.02, "ms"
    )
    copy = gpu.copy(16)
    hot, cold = gpu.measure(copy).estimate, gpu.measure(copy, cold=True).estimate
    yield Check(
        "a copy of 16 MiB takes longer with a cold cache",
        f"{hot:.4g} and {cold:.4g} ms",
        cold > hot,
    )


def ceilings(gpu: Hardware) -> Iterator[Check]:
    """What the machine reaches is what others have measured."""
    rows = gpu.run("doctor", dtypes=["float32", "float16", "bfloat16"], **gpu.doctor)
    found = dict(
        rows[rows.metric.isin(["ceiling_flops", "ceiling_bytes"])][["scope", "estimate"]].values
    )
    hopper = gpu.names()[0].startswith(("NVIDIA H100 80GB HBM3", "NVIDIA H200"))  # of the SXM form
    for scope, (least, most) in H100.items():
        unit = "TB/s" if scope == "copy" else "TFLOP/s"
        ends = (
            f"at least {least / 1e12:g}"
            if math.isinf(most)
            else f"{least / 1e12:g} to {most / 1e12:g}"
        )
        rate = float(found.get(scope, math.nan))
        text = f"{scope} on an H100 or H200: {ends} {unit}"
        yield Check(text, f"{rate / 1e12:.3g} {unit}", least <= rate <= most if hopper else None)
    seconds = {
        kind: gpu.measure(gpu.product(kind)).estimate for kind in ("float32", "tf32", "bfloat16")
    }
    gain = seconds["float32"] / seconds["tf32"]
    yield Check("tf32 is more than 3 × as fast as float32", f"{gain:.2f} ×", gain > 3)
    if reason := fp8.native(gpu.device):
        yield Check("8 bits are more than 1.5 × as fast as bfloat16", reason, None)
        return
    gain = seconds["bfloat16"] / gpu.measure(gpu.product("fp8")).estimate
    yield Check("8 bits are more than 1.5 × as fast as bfloat16", f"{gain:.2f} ×", gain > 1.5)


def attention(gpu: Hardware) -> Iterator[Check]:
    """The notebook's question at real lengths: dense backends, FlexAttention and sparse attention, forward and backward."""
    found = []
    for asked in (
        *({**gpu.grid, "seq_lens": [seq_len]} for seq_len in gpu.grid["seq_lens"]),
        gpu.math,
    ):
        found.append(gpu.run("attention", **asked))
        kinds = "dense (math)" if asked is gpu.math else "all kinds"
        yield from _every_case(f"attention, {kinds} at {asked['seq_lens']}", found[-1])
    rows = pd.concat(found, ignore_index=True)
    yield from _errors(
        "attention at real lengths against float64, in bfloat16", rows, "forward", 1e-2
    )
    yield from _shares("attention", rows)
    longest = rows[
        (rows.metric == "latency") & (rows["factor.seq_len"] == max(gpu.grid["seq_lens"]))
    ]
    for scope in ("forward", "backward"):
        times = longest[longest.scope == scope]
        dense = times[times["factor.name"].str.startswith("dense")].low.min()
        sparse = times[times["factor.name"] == "random s=0.9"].high.min()
        yield Check(
            f"{scope}: random s=0.9 is faster than every dense backend at the longest length",
            f"{sparse:.4g} and {dense:.4g} ms",
            bool(sparse < dense),
        )


def patterns(gpu: Hardware) -> Iterator[Check]:
    """Every kind and pattern is right, and is the kernel it is called."""
    rows = gpu.run("attention", **gpu.patterns)
    yield from _every_case("patterns", rows)
    yield from _errors("every pattern against float64, in bfloat16", rows, "forward", 1e-2)
    for backend, part in KERNELS.items():
        try:
            names = gpu.kernels(gpu.attend(backend))
        except Unsupported as refused:
            names = [str(refused)]
        named = [name for name in names if part in name.lower()]
        yield Check(
            f"dense ({backend}) launches a kernel named {part}", _few(named or names), bool(named)
        )


def memory(gpu: Hardware) -> Iterator[Check]:
    """Peaks of a gibibyte and more are those of the plan, and running out of memory costs one case."""
    rows = [gpu.run("attention", **gpu.peaks), gpu.run("model", **gpu.training)]
    found = pd.concat(rows, ignore_index=True)
    peaks = found[
        (found.metric == "peak_memory") & found.predicted.notna() & found.estimate.notna()
    ]
    for row in peaks.to_dict("records"):
        name = (
            row.get("factor.name")
            if isinstance(row.get("factor.name"), str)
            else row["factor.preset"]
        )
        away = abs(row["estimate"] - row["predicted"]) - 0.05 * row["predicted"]
        yield Check(
            f"{name} {row['scope']}: the peak is the plan's within 5 % and {SLACK_MIB} MiB",
            f"{row['estimate']:.4g} and {row['predicted']:.4g} MiB",
            bool(away <= SLACK_MIB),
        )
    yield Check(
        "peaks are planned, of attention and of training",
        f"{len(peaks)} rows",
        {*peaks.scope} >= gpu.planned,
    )
    before = gpu.reserved()
    yield from _accident(gpu, "memory", "oom")
    after = gpu.reserved()
    yield Check(
        "what was reserved is given back", f"{before} and {after} bytes", after <= before + 2**25
    )


def models(gpu: Hardware) -> Iterator[Check]:
    """Whole models: compiled and captured ones give what the eager one gives, and a captured token is faster."""
    found = []
    for asked in (gpu.model, gpu.larger):
        found.append(gpu.run("model", **asked))
        yield from _every_case(f"model {asked['presets'][0]}", found[-1])
    rows = pd.concat(found, ignore_index=True)
    yield from _errors("compiled and captured models against eager", rows, "against_eager", 2e-2)
    yield from _shares("model", rows)
    peaks = rows[(rows.metric == "peak_memory") & (rows.scope == "inference")]
    ratios = _beside_eager(peaks)
    text = "a captured forward pass holds no gradients: at most 1.5 × the eager peak"
    yield Check(text, _listed(ratios), bool(ratios and max(ratios) <= 1.5))
    ratios = _beside_eager(rows[(rows.metric == "latency") & (rows.scope == "decode")])
    yield Check(
        "a token by a captured graph is faster than an eager one",
        _listed(ratios),
        bool(ratios and max(ratios) < 1),
    )


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
    for asked in gpu.fp8_sizes:
        (preset,) = asked["presets"]
        rows = gpu.run("fp8", **asked)
        yield from _every_case(f"fp8 {preset}", rows)
        steps = rows[(rows.metric == "latency") & (rows.scope == "training_step")]
        by_precision = steps.groupby("factor.precision").estimate.first()
        gain = (
            by_precision.get("bfloat16", math.nan)
            / by_precision.drop("bfloat16", errors="ignore").min()
        )
        gains[PRESETS[preset]["d_model"]] = gain
        yield Check(
            f"fp8 {preset}: a step in bfloat16 over one in 8 bits is known",
            f"{gain:.2f} ×",
            bool(gain > 0),
        )
    widest = max(gains)
    said = f"{gains[widest]:.2f} × at a width of {widest}"
    yield Check(
        "training in 8 bits is faster than in bfloat16 at the largest width",
        said,
        bool(gains[widest] > 1),
    )
    recipes = {
        "precisions": ["bfloat16", *(f"fp8_{name}" for name in fp8.RECIPES)],
        "modes": ["forward", "training_step"],
    }
    yield from _every_case("fp8 recipes", gpu.run("fp8", **gpu.fp8, **recipes))
    names = gpu.kernels(gpu.convert())
    eight = [name for name in names if any(part in name.lower() for part in ("e4m3", "fp8", "f8"))]
    yield Check("a converted layer launches a kernel of 8 bits", _few(eight or names), bool(eight))


def energy(gpu: Hardware) -> Iterator[Check]:
    """Counter and power agree, and an idle GPU is flat."""
    rows = gpu.run("energy", **gpu.energy)
    yield from _every_case("energy", rows)
    told = gpu.busy(working=True)
    t_s, watts = np.asarray(told["t_s"]), np.asarray(told["watts"])
    counted, integrated = told["joules"][1] - told["joules"][0], float(np.trapezoid(watts, t_s))
    yield _near(
        "the counter's joules are those of the power samples within 5 %",
        counted,
        integrated,
        0.05,
        "J",
    )
    idle = np.asarray(gpu.busy(working=False)["watts"])
    half = idle[len(idle) // 2 :]  # it cools down from what was before
    spread = float(half.std() / half.mean())
    yield Check(
        "two idle seconds are flat within 10 %",
        f"{half.mean():.0f} W ± {spread:.1%}",
        spread <= 0.1,
    )


def ranks(gpu: Hardware) -> Iterator[Check]:
    """Every algorithm is right on one rank and on all, and the rank that hangs is named."""
    asked = {
        "algorithms": list(ALGORITHMS),
        "prefill_algorithms": ["ring", "zigzag", "ulysses"],
        "backward": True,
    }
    worlds = sorted({1, gpu.count()})
    rows = gpu.run(
        "distributed",
        world_sizes=worlds,
        memory_seq_lens=[],
        **asked,
        **gpu.ranks,
    )
    yield from _every_case("distributed", rows)
    for scope in sorted({*rows[rows.metric == "relative_error"].scope}):
        yield from _errors(f"{scope} against float64", rows, scope, 1e-2)
    peaks = rows[rows.metric == "peak_memory"].groupby("scope").estimate.max()
    ring, dense = (float(peaks.get(f"{name} training", math.nan)) for name in ("ring", "dense"))
    text = "a ring's training holds less than twice one rank's"
    yield Check(
        text, f"{ring:.4g} and {dense:.4g} MiB", ring < 2 * dense if gpu.count() > 1 else None
    )
    if gpu.count() < 2:
        yield Check("a rank that hangs is named", "one GPU: NCCL wants one for each rank", None)
        return
    try:
        gpu.hang()
    except RankFailed as failed:
        yield Check(
            "a rank that hangs is named",
            str(failed),
            "rank 1 of 2 let the others wait" in str(failed),
        )
    else:
        yield Check("a rank that hangs is named", "it did not hang", False)


def lost(gpu: Hardware) -> Iterator[Check]:
    """After a device assert the next case is measured all the same.

    The last part, since this process has no GPU after it.
    """
    yield from _accident(gpu, "assert", "error")


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


# By worth: whatever cuts the row short, what stands before has run.
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


def _near(text: str, found: float, wanted: float, share: float, unit: str) -> Check:
    return Check(
        text, f"{found:.4g} and {wanted:.4g} {unit}", abs(found - wanted) <= share * abs(wanted)
    )


def _few(names: list[str]) -> str:
    return ", ".join(sorted(name[:60] for name in names)[:4]) or "none"


def _every_case(name: str, rows: pd.DataFrame) -> Iterator[Check]:
    ends = rows[rows.metric == "case_duration"]
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    said = (
        "; ".join(f"{row.factors} {row.status}: {row.message}" for row in wrong.itertuples())
        or f"{len(ends)} cases"
    )
    holds = wrong.empty and (ends.status == "ok").any()
    yield Check(f"{name}: every case runs, or says why it cannot", said[:1000], bool(holds))


def _errors(text: str, rows: pd.DataFrame, scope: str, most: float) -> Iterator[Check]:
    errors = rows[(rows.metric == "relative_error") & (rows.scope == scope)].estimate
    found = f"at most {errors.max():.2g} in {len(errors)} rows"
    yield Check(
        f"{text}: the error is under {most:g}", found, bool(len(errors) and (errors < most).all())
    )


def _shares(name: str, rows: pd.DataFrame) -> Iterator[Check]:
    shares = rows[rows.metric == "mfu"].estimate
    found = f"at most {shares.max():.3f} in {len(shares)} rows"
    yield Check(
        f"{name}: no share of a ceiling is above 1.05",
        found,
        bool(len(shares) and (shares <= 1.05).all()),
    )


def _accident(gpu: Hardware, accident: str, status: str) -> Iterator[Check]:
    ends = gpu.run("accidents", accidents=[accident, "none"])
    ends = ends[ends.metric == "case_duration"]
    said = "; ".join(f"{row.status} {row.message}".strip() for row in ends.itertuples())
    named = any(words in said.lower() for words in LOSSES[accident])
    lost = bool(ends.details.iloc[0].get("device_lost")) == (accident == "assert")
    text = f"{accident}: the case is {status}, says why, and the next one is ok"
    yield Check(text, said[:300], named and lost and list(ends.status) == [status, "ok"])
