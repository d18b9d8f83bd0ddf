"""Compile ahead of a part, on all cores: it would take most of its time for it."""

import importlib
import multiprocessing
import os
import sys
import time

import torch

_AHEAD_S = 45.0


def compile_ahead(name, device, *asked):
    """Call each compiled case once, in as many processes as there are cores; torch's caches on disk serve the part.

    One entry after the other, since cases of large models fit into a GPU's memory by threes; and not for longer than 45 s.

    Args:
        name: The experiment.
        device: A GPU that this process has not touched yet.
        asked: Parameters of the experiment, without the device.
    """
    end = time.monotonic() + _AHEAD_S
    for params in asked:
        cases = range(len(_compiled(name, params, "cpu")))
        calls = [(name, params, device, at) for at in cases]
        with multiprocessing.get_context("fork").Pool(min(len(cases), os.cpu_count() or 1)) as pool:
            compiled = pool.starmap_async(_compile, calls, chunksize=1)
            compiled.wait(max(0.0, end - time.monotonic()))


def _compile(name, params, device, at):
    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)  # the others use the other cores
    try:
        for call in _calls(_compiled(name, params, device)[at]):
            call()
        torch.cuda.synchronize()
    except Exception as error:  # the part meets it too, and says so
        said = f"compiling {name} {at}: {type(error).__name__}: {error}"[:200]
        print(said, file=sys.stderr, flush=True)


def _compiled(name, params, device):
    """The cases of an experiment that torch compiles; to list them for a CPU touches no GPU."""
    module = importlib.import_module(f"nanolib.experiments.{name}.cases")
    cases = module.cases(module.Params(device=device, **params))
    kernels = ("sparse", "flex")
    return [
        case
        for case in cases
        if getattr(case, "attention_type", "") in kernels
        or getattr(case, "compiled", False) is True
    ]


def _calls(case):
    """What a case compiles, by being called."""
    if hasattr(case, "workloads"):
        return [work.call for work in case.workloads(*case.inputs(0))]
    from nanolib.experiments.model.data import text_batch
    from nanolib.experiments.model.steps import Training
    from nanolib.models import fp8

    model = case.model_case.build(0)
    if case.recipe:
        fp8.convert(model, case.recipe, excluded_modules=case.keep, emulate=False)
    return [Training(model, text_batch(case, "", 0), "compile", 1e-4)]
