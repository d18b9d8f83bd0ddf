"""Compile ahead of a part, on all cores: it would take most of its time for it."""

import multiprocessing
import os
import sys
import time
from dataclasses import replace

import torch

from nanolib.experiments import ALL
from nanolib.measurement import cause
from nanolib.meters.time.sampler import Timing

_AHEAD_S = 45.0


def compile_ahead(name, device, *asked):
    """Call each compiled case once, in as many processes as there are cores; torch's caches on disk serve the part.

    One entry after the other, since cases of large models fit into a GPU's memory by threes; and not for longer than 45 s.

    Args:
        name: The experiment.
        device: A GPU that this process has not touched yet.
        asked: Parameters of the experiment, without the device.
    """
    experiment, end = ALL[name](), time.monotonic() + _AHEAD_S
    for one in asked:
        params = experiment.Params(device="cpu", **one)  # to list them for a CPU touches no GPU
        cases = [case for case in experiment.cases(params) if _is_compiled(case)]
        calls = [(replace(case, device=device), params) for case in cases]
        with multiprocessing.get_context("fork").Pool(min(len(cases), os.cpu_count() or 1)) as pool:
            compiled = pool.starmap_async(_compile, calls, chunksize=1)
            compiled.wait(max(0.0, end - time.monotonic()))


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
