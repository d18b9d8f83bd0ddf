# ruff: noqa: RUF012  no parameters are changed in place
"""What the first minutes ask of a GPU: readings of its driver, timings, kernels by name, and experiments on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from nanolib.experiments import ALL, doctor
from nanolib.measurement import Measurement
from nanolib.meters import ceilings, measure
from nanolib.meters.gpu import gpu_watts
from nanolib.meters.machine import gpu_uuid
from nanolib.models import attention, fp8
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.run import sweep
from nanolib.run.ranks import run_ranks
from nanolib.store import Store
from tests.models.inputs import REQUIRED
from tests.run import rank_bodies, sample_experiment

Call = Callable[[], object]
SECONDS = 2.0
SETTLE_S = (
    1.5  # where the driver tells no power of the moment, what it tells is the mean over a second
)


MATH = {"kind": "dense", "backend": "math"}  # at long lengths it needs more memory than there is
DENSE = [{"kind": "dense", "backend": name} for name in ("flash", "efficient", "cudnn")]
RANDOM = [{"kind": "sparse", "pattern": "random", "sparsity": share} for share in (0.5, 0.75, 0.9)]
WINDOW = {"pattern": "window", "window": 256}
ATTENTION = {"dtypes": ["bfloat16"], "backward": True, "quality_patterns": []}
MODEL = {"overrides": {}, "dtypes": ["bfloat16"], "generation_batch_sizes": [], "loss_steps": 0}
FP8 = {"batch_size": 4, "parity_recipes": [], "numerics": []}


class Hardware:
    """One NVIDIA GPU, its driver and torch, and how large what it is asked is.

    Args:
        store: The database of its experiments.
    """

    device = "cuda:0"
    doctor = {"budget_s": 1.0}
    grid = ATTENTION | {
        "attention_types": [*DENSE, {"kind": "flash_attn"}, {"kind": "flex", **WINDOW}, *RANDOM],
        "seq_lens": [4096, 16_384], "num_heads": 16, "head_dim": 128, "budget_s": 0.5,
    }  # fmt: skip
    math = grid | {"attention_types": [MATH], "seq_lens": [4096]}
    patterns = ATTENTION | {
        "attention_types": [
            MATH, *DENSE, {"kind": "flash_attn"}, {"kind": "flex", **WINDOW},
            *({"kind": "sparse", "pattern": name} | REQUIRED.get(name, {}) for name in (*PATTERNS, *CHOOSERS)),
        ],
        "seq_lens": [2048], "num_heads": 8, "head_dim": 64, "budget_s": 0.2,
    }  # fmt: skip
    peaks = ATTENTION | {
        "attention_types": [DENSE[0], {"kind": "sparse", **WINDOW}],
        "seq_lens": [32_768], "num_heads": 32, "head_dim": 128, "budget_s": 0.1,
    }  # fmt: skip
    training = MODEL | {
        "presets": ["gpt_350M"], "seq_lens": [1024], "batch_sizes": [8], "train": True, "new_tokens": 0, "budget_s": 0.2,
    }  # fmt: skip
    planned = {"forward", "forward_backward", "training_step"}
    model = MODEL | {
        "presets": ["gpt_125M"], "seq_lens": [512], "batch_sizes": [4], "new_tokens": 32,
        "optimizations": ["eager", "compile", "cuda_graph"],
    }  # fmt: skip
    larger = model | {"presets": ["gpt_350M"], "optimizations": ["eager", "cuda_graph"]}
    fp8 = FP8 | {"presets": ["gpt_125M"], "overrides": {}, "seq_len": 512}
    fp8_sizes = [
        FP8 | {
            "presets": [preset], "overrides": {"num_layers": 2}, "seq_len": 2048, "modes": ["training_step"],
            "compiled": [True], "precisions": ["bfloat16", "fp8_tensorwise", "fp8_rowwise"], "budget_s": 1.0,
        }
        for preset in ("gpt_1.3B", "gpt_350M", "gpt_6.7B")  # widths, which decide what 8 bits gain
    ]  # fmt: skip
    energy = {
        "presets": ["gpt_350M"], "overrides": {}, "seq_lens": [512], "batch_size": 8, "new_tokens": 32, "dtype": "bfloat16",
        "window_s": 2.0, "idle_s": 2.0, "profiling": [],
    }  # fmt: skip
    ranks = {"seq_lens": [65_536], "prefill_seq_lens": [4096], "num_heads": 8, "head_dim": 64}

    def __init__(self, store: Path) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._gpu = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(self.device))
        self._store = store

    # the driver

    def names(self) -> tuple[str, str]:
        """What torch calls it, and what the driver calls the GPU of torch's UUID."""
        torchs = torch.cuda.get_device_properties(self.device).name
        return torchs, self._nvml.nvmlDeviceGetName(self._gpu)

    def count(self) -> int:
        """How many GPUs torch sees."""
        return torch.cuda.device_count()

    def busy(self, working: bool) -> dict[str, Any]:
        """Two seconds of matrix products, or of nothing, begun a while before: joules before and after, and W with their seconds.

        Returns:
            `joules` (before, after), `t_s` and `watts` of the same length.
        """
        product = self.product("bfloat16")
        self._watts_during(product if working else None, SETTLE_S)
        before = self._joules()
        t_s, watts = self._watts_during(product if working else None, SECONDS)
        return {"joules": (before, self._joules()), "t_s": t_s, "watts": watts}

    def _watts_during(self, work: Call | None, seconds: float) -> tuple[list[float], list[float]]:
        start, t_s, watts = time.monotonic(), [], []
        while (now := time.monotonic() - start) < seconds:
            if work:
                work()
                torch.cuda.synchronize(self.device)
            else:
                time.sleep(0.02)
            t_s.append(now)
            watts.append(gpu_watts(self._nvml, self._gpu))
        return t_s, watts

    def _joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu) / 1e3

    # calls

    def product(self, kind: str) -> Call:
        """A product of 8192³ in a type, in tf32, or in 8 bits."""
        a, b = ceilings._operands(self.device, kind)
        call = ceilings._product(a, b, kind)

        def in_its_way() -> None:
            with ceilings.tf32_products(kind == "tf32"):
                call()

        return in_its_way

    def small(self) -> Call:
        """A kernel that does next to nothing."""
        x = torch.zeros(1, device=self.device)
        return lambda: x.add_(1)

    def sleep(self, cycles: int) -> Call:
        """The device waits so many cycles."""
        return lambda: torch.cuda._sleep(cycles)

    def copy(self, mib: int) -> Call:
        """So much is read, and as much written."""
        source, target = (
            torch.ones(mib * 2**20, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        return lambda: target.copy_(source)

    def attend(self, backend: str, seq_len: int = 2048) -> Call:
        """Dense attention by a backend, in bfloat16."""
        q = torch.randn(1, 8, seq_len, 64, device=self.device, dtype=torch.bfloat16)
        return lambda: attention.attend("dense", q, q, q, causal=True, options={"backend": backend})

    def convert(self) -> Call:
        """A layer in 8 bits, forward."""
        layer = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False)).to(
            self.device, torch.bfloat16
        )
        fp8.convert(layer, "tensorwise", excluded_modules=(), emulate=False)
        x = torch.randn(1024, 1024, device=self.device, dtype=torch.bfloat16)
        return lambda: layer(x)

    # looking on

    def measure(self, call: Call, *, cold: bool = False) -> Measurement:
        """As everything is timed here."""
        return measure(call, 0.005, 1.0, device=self.device, cold=cold)

    def do_bench_ms(self, call: Call) -> float:
        """As Triton times it."""
        from triton.testing import do_bench

        return do_bench(call, return_mode="median")

    def kernels(self, call: Call) -> list[str]:
        """The names of the kernels that a call launches."""
        call()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as seen:
            call()
            torch.cuda.synchronize(self.device)
        return [event.key for event in seen.key_averages()]

    def reserved(self) -> int:
        """Bytes that torch holds of the GPU."""
        return torch.cuda.memory_reserved(self.device)

    # experiments

    def run(self, name: str, **asked: Any) -> pd.DataFrame:
        """All rows of an experiment on this GPU; `sample` has accidents."""
        own = {"sample": sample_experiment, "doctor": doctor}
        experiment = own[name] if name in own else ALL[name]()
        with Store(self._store) as store:
            run = sweep.measure(
                experiment,
                experiment.Params(device=self.device, **asked),
                store=store,
                progress=False,
            )
            rows = run.measurements()
            run.finish()
        return rows

    def hang(self) -> None:
        """Two ranks, of which the second lets the other wait.

        Raises:
            RankFailed: It says which, and where it was.
        """
        kind = torch.device(self.device).type
        run_ranks(
            rank_bodies.misbehave,
            {"how": "hang", "rank": 1},
            world_size=2,
            device=kind,
            timeout_s=120,
            rank_timeout_s=8,
        )
