# ruff: noqa: RUF012  no parameters are changed in place
"""What the first minutes ask of a GPU: readings of its driver, timings, and experiments on it."""

import functools
import multiprocessing
import os
import sys
import time
from dataclasses import replace

import numpy as np
import torch

from nanolib.experiments import ALL, doctor
from nanolib.measurement import cause
from nanolib.meters import measure
from nanolib.meters.interference import gpu_watts
from nanolib.meters.machine import gpu_uuid
from nanolib.meters.sampler import Timing
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.run import peaks
from tests.measuring import rows_of
from tests.models.inputs import REQUIRED
from tests.run import sample_experiment

AHEAD_S, SECONDS = 45.0, 2.0
# where the driver tells no power of the moment, what it tells is the mean over a second
SETTLE_S = 1.5

MATH = {"kind": "dense", "backend": "math"}  # at long lengths it needs more memory than there is
DENSE = [{"kind": "dense", "backend": name} for name in ("flash", "efficient", "cudnn")]
RANDOM = [{"kind": "sparse", "pattern": "random", "sparsity": share} for share in (0.5, 0.75, 0.9)]
WINDOW = {"pattern": "window", "window": 256}
OWN_KERNELS = [*DENSE, {"kind": "flash_attn"}, {"kind": "flex", **WINDOW}]
ATTENTION = {"dtypes": ["bfloat16"], "quality_attentions": []}
MODEL = {"dtypes": ["bfloat16"], "generation_batch_sizes": []}
FP8 = {"batch_size": 4, "parity_recipes": []}


class Hardware:
    """One NVIDIA GPU, its driver and torch, and how large what it is asked is.

    Args:
        folder: Of the database of its experiments.
    """

    device = "cuda:0"
    grid = ATTENTION | {
        "attention_types": [*OWN_KERNELS, *RANDOM],
        "seq_lens": [4096, 16_384], "num_heads": 16, "head_dim": 128, "budget_s": 0.5,
    }  # fmt: skip
    patterns = ATTENTION | {
        "attention_types": [
            MATH, *OWN_KERNELS,
            *({"kind": "sparse", "pattern": name} | REQUIRED.get(name, {})
              for name in (*PATTERNS, *CHOOSERS)),
        ],
        "seq_lens": [2048], "num_heads": 8, "budget_s": 0.2,
    }  # fmt: skip
    peaks = ATTENTION | {
        "attention_types": [DENSE[0], {"kind": "sparse", **WINDOW}],
        "seq_lens": [32_768], "num_heads": 32, "head_dim": 128, "budget_s": 0.1,
    }  # fmt: skip
    training = MODEL | {
        "presets": ["gpt_350M"], "seq_lens": [1024], "batch_sizes": [8], "new_tokens": 0,
        "budget_s": 0.2,
    }  # fmt: skip
    model = MODEL | {
        "presets": ["gpt_125M"], "seq_lens": [512], "batch_sizes": [4], "new_tokens": 32,
        "optimizations": ["eager", "compile", "cuda_graph"],
    }  # fmt: skip
    larger = model | {"presets": ["gpt_350M"], "optimizations": ["eager", "cuda_graph"]}
    fp8 = FP8 | {"presets": ["gpt_125M"], "seq_len": 512}
    fp8_sizes = [
        FP8 | {
            "presets": [preset], "overrides": {"num_layers": 2}, "seq_len": 2048,
            "compiled": [True], "precisions": ["bfloat16", "fp8_tensorwise", "fp8_rowwise"],
            "budget_s": 1.0,
        }
        for preset in ("gpt_1.3B", "gpt_350M", "gpt_6.7B")  # widths, which decide what 8 bits gain
    ]  # fmt: skip
    energy = {
        "presets": ["gpt_350M"], "seq_lens": [512], "batch_size": 8, "dtype": "bfloat16",
        "window_s": 2.0, "idle_s": 2.0, "profiling": [],
    }  # fmt: skip
    ranks = {"seq_lens": [65_536], "prefill_seq_lens": [4096]}

    def __init__(self, folder):
        self._folder = folder

    def compile_ahead(self, name, *asked):
        """Call each compiled case once, in a process per core; torch's caches then serve the part.

        This process has not touched the GPU yet. One entry after the other, since cases of large
        models fit into a GPU's memory by threes; and not for longer than 45 s.

        Args:
            name: The experiment.
            asked: Parameters of the experiment, without the device.
        """
        experiment, end = ALL[name](), time.monotonic() + AHEAD_S
        for one in asked:
            params = experiment.Params(device="cpu", **one)  # to list them for a CPU touches no GPU
            cases = [case for case in experiment.cases(params) if _is_compiled(case)]
            calls = [(replace(case, device=self.device), params) for case in cases]
            processes = min(len(cases), os.cpu_count() or 1)
            with multiprocessing.get_context("fork").Pool(processes) as pool:
                compiled = pool.starmap_async(_compile, calls, chunksize=1)
                compiled.wait(max(0.0, end - time.monotonic()))

    @functools.cached_property
    def _sensors(self):
        """The driver and its handle; what is compiled ahead must find an untouched GPU."""
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid(self.device))

    def names(self):
        """What torch calls it, and what the driver calls the GPU of torch's UUID."""
        nvml, gpu = self._sensors
        torchs = torch.cuda.get_device_properties(self.device).name
        return torchs, nvml.nvmlDeviceGetName(gpu)

    def busy(self, working):
        """Two seconds of products, or of nothing, begun before: joules, and W with seconds."""
        nvml, gpu = self._sensors
        work = self.product() if working else lambda: time.sleep(0.02)
        self._watts_during(work, SETTLE_S)
        before = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        t_s, watts = self._watts_during(work, SECONDS)
        after = nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)
        return (after - before) / 1e3, t_s, watts

    def _watts_during(self, work, seconds):
        start, samples = time.monotonic(), []
        while (now := time.monotonic() - start) < seconds:
            work()
            torch.cuda.synchronize(self.device)
            samples.append((now, gpu_watts(*self._sensors)))
        return np.transpose(samples)

    def product(self):
        """A product of 8192³ in bfloat16."""
        return peaks._product(self.device, "bfloat16")

    def measure(self, call, *, cold=False):
        """As everything is timed here."""
        return measure(call, 0.005, 1.0, device=self.device, cold=cold)

    def run(self, name, **asked):
        """All rows of an experiment on this GPU; `sample` has accidents."""
        own = {"sample": sample_experiment, "doctor": doctor}
        experiment = own[name] if name in own else ALL[name]()
        params = experiment.Params(device=self.device, **asked)
        return rows_of(experiment, params, self._folder)


def _is_compiled(case):
    own_kernels = getattr(case, "attention_type", "") in ("sparse", "flex")
    return own_kernels or getattr(case, "compiled", False)


def _compile(case, params):
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)  # the others use the other cores
    try:
        if hasattr(case, "workloads"):
            for work in case.workloads(*case.inputs(0)):
                work.call()
        else:  # it compiles before it is timed
            next(made for made in case.measure(params, {}) if isinstance(made, Timing))
        torch.cuda.synchronize()
    except Exception as error:  # the part meets it too, and says so
        print(f"compiling {case}: {cause(error)[:200]}", file=sys.stderr, flush=True)
