"""The parts of the first minutes on a GPU, each with its checks."""

import functools
import math
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from nanolib.config import PRESETS
from nanolib.measurement import Flag
from nanolib.models import fp8
from nanolib.models.attention.tree import ALGORITHMS

SLACK_MIB = 32  # what cuBLAS keeps for a stream: a thirtieth of the peaks that are compared
# of the SXM form: the least that others measured, and the datasheet's product without sparsity
H100 = {"bfloat16": (500e12, 990e12), "copy": (2.2e12, math.inf)}


class Check(NamedTuple):
    """One assertion.

    Attributes:
        text: What must hold.
        found: What was found.
        holds: Whether it does; None where this machine cannot show it.
    """

    text: str
    found: str
    holds: bool | None


def near(text, found, wanted, share, unit):
    holds = abs(found - wanted) <= share * abs(wanted)
    return Check(text, f"{found:.4g} and {wanted:.4g} {unit}", bool(holds))


def at_most(text, values, most):
    found = f"at most {values.max():.3g} in {len(values)} rows"
    return Check(f"{text} is at most {most:g}", found, bool(len(values) and values.max() <= most))


def selected(rows, metric, scope):
    return rows[(rows.metric == metric) & (rows.scope == scope)]


def error_at_most(text, rows, scope, most):
    errors = selected(rows, "relative_error", scope)
    return at_most(f"{text}: the error", errors.estimate, most)


def shares_of_peak(name, rows):
    return at_most(f"{name}: each share of a ceiling", rows[rows.metric == "mfu"].estimate, 1.05)


def every_case(name, rows):
    ends = rows[rows.metric == "case_duration"]
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    said = "; ".join(f"{row.factors} {row.status}: {row.message}" for row in wrong.itertuples())
    holds = wrong.empty and (ends.status == "ok").any()
    found = said[:1000] or f"{len(ends)} cases"
    return Check(f"{name}: every case runs, or says why it cannot", found, bool(holds))


def accident(gpu, behavior, status, words):
    """What `sample_experiment` calls an accident costs one case, whose message has the words."""
    ends = gpu.run("sample", behaviors=[behavior, "ok"])
    ends = ends[ends.metric == "case_duration"]
    said = "; ".join(f"{row.status} {row.message}".strip() for row in ends.itertuples())
    lost = bool(ends.details.iloc[0].get("device_lost")) == (behavior == "assert")
    text = f"{behavior}: the case is {status}, says why, and the next one is ok"
    holds = words in said.lower() and lost and list(ends.status) == [status, "ok"]
    return Check(text, said[:300], holds)


def identity(gpu):
    """The sensors are those of the GPU that torch uses."""
    torchs, drivers = gpu.names()
    text = "the driver's GPU of torch's UUID has torch's name"
    yield Check(text, f"{torchs}; {drivers}", torchs == drivers)
    joules, t_s, watts = gpu.busy(working=True)
    text = "joules over seconds are the driver's watts within 20 %"
    yield near(text, joules / t_s[-1], watts.mean(), 0.2, "W")


def clock(gpu):
    """Times are those of the device, and say when they are not."""
    from triton.testing import do_bench

    product = gpu.product()
    ours, theirs = gpu.measure(product).estimate, do_bench(product, return_mode="median")
    text = "a bfloat16 product of 8192³ takes what do_bench says within 3 %"
    yield near(text, ours, theirs, 0.03, "ms")
    x = torch.zeros(1, device=gpu.device)
    small = gpu.measure(lambda: x.add_(1))
    both = f"host_ms {small.details.get('host_ms')}, device_ms {small.details.get('device_ms')}"
    text = "a kernel that does nothing is launch-bound"
    yield Check(text, both, Flag.LAUNCH_BOUND in small.flags)
    once, twice = (
        gpu.measure(functools.partial(torch.cuda._sleep, cycles)).estimate
        for cycles in (10**7, 2 * 10**7)
    )
    text = "twice the cycles of waiting read twice the time within 2 %"
    yield near(text, twice, 2 * once, 0.02, "ms")
    source, target = torch.ones(2, 2**24, dtype=torch.uint8, device=gpu.device)
    hot, cold = (
        gpu.measure(lambda: target.copy_(source), cold=cold).estimate for cold in (False, True)
    )
    text = "a copy of 16 MiB takes longer with a cold cache"
    yield Check(text, f"{hot:.4g} and {cold:.4g} ms", cold > hot)


def ceilings(gpu):
    """The peak rates are those that others have measured."""
    rows = gpu.run("doctor", dtypes=["float32", "float16", "bfloat16"], budget_s=1.0)
    rows = rows[rows.metric.isin(["ceiling_flops", "ceiling_bytes"])]
    rates = dict(rows[["scope", "estimate"]].values)
    hopper = gpu.names()[0].startswith(("NVIDIA H100 80GB HBM3", "NVIDIA H200"))  # of the SXM form
    for scope, (least, most) in H100.items():
        unit = "TB/s" if scope == "copy" else "TFLOP/s"
        rate = float(rates.get(scope, math.nan))
        text = f"{scope} on an H100 or H200: {least / 1e12:g} to {most / 1e12:g} {unit}"
        yield Check(text, f"{rate / 1e12:.3g} {unit}", least <= rate <= most if hopper else None)
    reason = fp8.native(gpu.device)
    for slow, fast, least in (("float32", "tf32", 3), ("bfloat16", "fp8", 1.5)):
        text = f"products in {fast} are more than {least} × as fast as in {slow}"
        if fast == "fp8" and reason:
            yield Check(text, reason, None)
            continue
        gain = rates.get(fast, math.nan) / rates.get(slow, math.nan)
        yield Check(text, f"{gain:.2f} ×", bool(gain > least))


def attention(gpu):
    """Dense backends, FlexAttention and sparse attention at real lengths, forward and backward."""
    gpu.compile_ahead("attention", gpu.grid)
    found = []
    for length in gpu.grid["seq_lens"]:
        found.append(gpu.run("attention", **gpu.grid | {"seq_lens": [length]}))
        yield every_case(f"attention at {length}", found[-1])
    rows = pd.concat(found, ignore_index=True)
    text = "attention at real lengths against float64, in bfloat16"
    yield error_at_most(text, rows, "forward", 1e-2)
    yield shares_of_peak("attention", rows)
    longest = rows[rows["factor.seq_len"] == max(gpu.grid["seq_lens"])]
    for scope in ("forward", "backward"):
        times = selected(longest, "latency", scope)
        dense = times[times["factor.name"].str.startswith("dense")].low.min()
        sparse = times[times["factor.name"] == "random s=0.9"].high.min()
        text = f"{scope}: random s=0.9 is faster than every dense backend at the longest length"
        yield Check(text, f"{sparse:.4g} and {dense:.4g} ms", bool(sparse < dense))


def patterns(gpu):
    """Every kind and pattern is right, or says why it cannot run."""
    gpu.compile_ahead("attention", gpu.patterns)
    rows = gpu.run("attention", **gpu.patterns)
    yield every_case("patterns", rows)
    yield error_at_most("every pattern against float64, in bfloat16", rows, "forward", 1e-2)


def memory(gpu):
    """Peaks of a GiB and more are those of the plan, and running out of memory costs one case."""
    gpu.compile_ahead("attention", gpu.peaks)
    rows = [gpu.run("attention", **gpu.peaks), gpu.run("model", **gpu.training)]
    found = pd.concat(rows, ignore_index=True)
    peaks = found[found.metric == "peak_memory"].dropna(subset=["predicted", "estimate"])
    peaks = peaks.assign(of=peaks["factor.preset"].fillna(peaks["factor.name"]))
    for row in peaks.itertuples():
        text = f"{row.of} {row.scope}: the peak is the plan's within 5 % and {SLACK_MIB} MiB"
        both = f"{row.estimate:.4g} and {row.predicted:.4g} MiB"
        away = abs(row.estimate - row.predicted) - 0.05 * row.predicted
        yield Check(text, both, bool(away <= SLACK_MIB))
    text = "peaks are planned, of attention and of training"
    planned = {"forward", "forward_backward", "training_step"} <= {*peaks.scope}
    yield Check(text, f"{len(peaks)} rows", planned)
    before = torch.cuda.memory_reserved(gpu.device)
    yield accident(gpu, "oom", "oom", "out of memory")
    after = torch.cuda.memory_reserved(gpu.device)
    text = "what was reserved is given back"
    yield Check(text, f"{before} and {after} bytes", after <= before + 2**25)


def models(gpu):
    """Compiled and captured models give what the eager one gives; a captured token is faster."""
    found = []
    for asked in (gpu.model, gpu.larger):
        found.append(gpu.run("model", **asked))
        yield every_case(f"model {asked['presets'][0]}", found[-1])
    rows = pd.concat(found, ignore_index=True)
    yield error_at_most("compiled and captured models against eager", rows, "against_eager", 2e-2)
    yield shares_of_peak("model", rows)
    times = _beside_eager(selected(rows, "latency", "decode"))
    yield at_most("the time of a token by a captured graph over an eager one's", times, 1.0)


def _beside_eager(rows):
    """What a captured graph needs as a share of what eager needs, a value per model."""
    by_model = rows.set_index("factor.preset")
    eager, graph = (
        by_model[by_model["factor.optimization"] == name].estimate
        for name in ("eager", "cuda_graph")
    )
    return (graph / eager).dropna()


def eight_bits(gpu):
    """Training in 8 bits at several widths, and every recipe once, forward and training."""
    gpu.compile_ahead("fp8", *gpu.fp8_sizes)
    reason = fp8.native(gpu.device) or ("" if find_spec("torchao") else "torchao is not installed")
    if reason:
        yield Check("all recipes compute in 8 bits", reason, None)
        return
    gains = {}
    for params in gpu.fp8_sizes:
        (preset,) = params["presets"]
        rows = gpu.run("fp8", **params)
        yield every_case(f"fp8 {preset}", rows)
        steps = selected(rows, "latency", "training_step")
        times = steps.set_index("factor.precision").estimate
        gain = times.get("bfloat16", math.nan) / times.filter(like="fp8").min()
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
    yield every_case("fp8 recipes", gpu.run("fp8", **gpu.fp8, **recipes))


def energy(gpu):
    """Counter and power agree, and an idle GPU is flat."""
    yield every_case("energy", gpu.run("energy", **gpu.energy))
    joules, t_s, watts = gpu.busy(working=True)
    text = "the counter's joules are those of the power samples within 5 %"
    yield near(text, joules, float(np.trapezoid(watts, t_s)), 0.05, "J")
    _, _, idle = gpu.busy(working=False)
    half = idle[len(idle) // 2 :]  # it cools down from what was before
    spread = float(half.std() / half.mean())
    text = "two idle seconds are flat within 10 %"
    yield Check(text, f"{half.mean():.0f} W ± {spread:.1%}", spread <= 0.1)


def ranks(gpu):
    """Every algorithm is right on one rank and on all."""
    params = {
        "algorithms": list(ALGORITHMS),
        "prefill_algorithms": ["ring", "zigzag", "ulysses"],
        "backward": True,
        "world_sizes": sorted({1, torch.cuda.device_count()}),
        "memory_seq_lens": [],
    }
    rows = gpu.run("distributed", **params, **gpu.ranks)
    yield every_case("distributed", rows)
    for scope in sorted({*rows[rows.metric == "relative_error"].scope}):
        yield error_at_most(f"{scope} against float64", rows, scope, 1e-2)


def lost(gpu):
    """After a device assert the next case is measured all the same."""
    # the last part, since this process has no GPU after it
    yield accident(gpu, "assert", "error", "device-side assert")


# What a part asks of the GPU, and after how many seconds it is stopped; what it has shown until
# then stays. By worth: if the time is cut short, the first ones have run.
PARTS = {
    "identity": (identity, 20),
    "clock": (clock, 30),
    "ceilings": (ceilings, 40),
    "attention": (attention, 150),
    "models": (models, 120),
    "fp8": (eight_bits, 180),
    "energy": (energy, 40),
    "memory": (memory, 60),
    "patterns": (patterns, 110),
    "ranks": (ranks, 60),
    "lost device": (lost, 30),
}
