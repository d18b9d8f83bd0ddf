"""A part of the first minutes in a process of its own: what hangs, crashes or loses its device costs its own limit alone.

The processes are forked from a server that has imported torch and has touched no GPU.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.gpu.parts", "nanolib.run.sweep"])
IMPORT_S = 300.0  # a busy machine imports torch in a minute
_END_S = 1.0  # after its last word
_GRACE_S = 5.0  # a sweep that is interrupted marks its run
_AHEAD_S = 45.0
REHEARSAL = (
    "NANOLIB_REHEARSAL"  # set where the GPU is a stand-in that computes nothing: see null_cuda
)


class PartFailed(Exception):
    """It broke, died, or took too long; the message says which."""


def begin() -> None:
    """Start the server, which imports torch while the caller does."""
    forkserver.ensure_running()


def messages(target: Any, arguments: tuple, limit_s: float) -> Iterator[Any]:
    """What a process of its own sends.

    Args:
        target: Called there with a function that sends a message, and the arguments.
        arguments: More for it.
        limit_s: Then it is stopped.

    Raises:
        PartFailed: As it says.
    """
    receiving, sending = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(target, arguments, sending))
    end = time.monotonic() + limit_s
    process.start()
    sending.close()
    try:
        while receiving.poll(max(0.0, end - time.monotonic())):
            kind, message = receiving.recv()
            if kind == "failed":
                raise PartFailed(message)
            if kind == "end":
                return
            yield message
        raise PartFailed(f"stopped after {limit_s:.0f} s")
    except EOFError:
        process.join(_GRACE_S)
        raise PartFailed(f"its process ended with exit code {process.exitcode}") from None
    finally:
        _stop(process)


def _run(target: Any, arguments: tuple, sending: Connection) -> None:
    os.setsid()  # it is stopped with all that it has started
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    threading.Thread(target=_die_with, args=(sending,), daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # nobody listens to what was stopped
        try:
            target(lambda message: sending.send(("message", message)), *arguments)
            times = os.times()
            sending.send(("message", sum(times[:4])))  # its own, and its children's
            sending.send(("end", None))
        except KeyboardInterrupt:  # it was stopped, and has said so
            traceback.print_exc()
        except Exception as error:
            traceback.print_exc()
            sending.send(("failed", f"{type(error).__name__}: {error}".splitlines()[0]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads and compilers are not waited for


def _die_with(sending: Connection) -> None:
    """End this process and all that it has started when nobody listens any more: it would keep the GPU."""
    gone = select.poll()
    gone.register(sending.fileno(), 0)  # which tells of errors alone
    gone.poll()
    os.killpg(0, signal.SIGKILL)


def _stop(process: Any) -> None:
    process.join(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)
        process.join(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def send_part(send: Any, name: str, store: str) -> None:
    """Send the checks of a part as they come.

    Args:
        send: Sends one.
        name: In `PARTS`.
        store: The database.
    """
    from tests.gpu.hardware import Hardware
    from tests.gpu.parts import PARTS

    if os.environ.get(REHEARSAL):
        _rehearse()
    part = PARTS[name]
    _compile_ahead(part.compiles(Hardware), Hardware.device)
    for check in part.checks(Hardware(Path(store))):
        send(check)


def _rehearse() -> None:
    """Leave out what cannot run where nothing is computed.

    These are kernels that cuDNN builds or that look for their own code, and torchao's check of its scales.
    """
    import torch
    from torchao.float8 import float8_utils

    from tests.gpu import parts
    from tests.gpu.hardware import Hardware

    torch.backends.cuda.enable_cudnn_sdp(False)
    float8_utils._round_scale_down_to_power_of_2 = lambda scale: scale
    for backend in ("efficient", "cudnn"):
        parts.KERNELS.pop(backend)
        for name in ("grid", "patterns"):
            asked = getattr(Hardware, name)
            kinds = [kind for kind in asked["attention_types"] if kind.get("backend") != backend]
            setattr(Hardware, name, asked | {"attention_types": kinds})
    # a core compiles each shape, density and block anew, in half a minute: one of each, and one width, show as much
    kinds = [
        kind for kind in Hardware.grid["attention_types"] if kind.get("sparsity") in (None, 0.9)
    ]
    Hardware.grid = Hardware.grid | {"attention_types": kinds, "seq_lens": [4096]}
    Hardware.patterns = Hardware.patterns | {"backward": False}
    Hardware.fp8_sizes = [
        asked | {"overrides": {"num_layers": 1}} for asked in Hardware.fp8_sizes[2:3]
    ]


def send_identity(send: Any) -> None:
    """Send what torch calls the GPU, and the versions of what makes its numbers."""
    import torch

    from nanolib.meters.machine import this_machine
    from nanolib.run.provenance import git_revision

    machine = this_machine()
    found = {"gpu": machine.gpus[0]["name"], "driver": machine.driver, "torch": machine.torch}
    found |= {"cuda": torch.version.cuda, "python": sys.version.split()[0]}
    for package in ("triton", "torchao", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    send(found | {"nanolib": git_revision()})


# what is compiled ahead, on all cores: a part would take most of its time for it


def _compile_ahead(asked: list[tuple[str, dict[str, Any]]], device: str) -> None:
    """Call each compiled case once, in as many processes as there are cores; torch's caches on disk serve the part.

    One entry after the other, since cases of large models fit into a GPU's memory by threes; and not for longer than 45 s.
    """
    end = time.monotonic() + _AHEAD_S
    for name, params in asked:
        cases = [(name, params, at) for at in range(len(_compiled(name, params, "cpu")))]
        cores = min(len(cases), os.cpu_count() or 1)
        workers = []
        for first in range(cores):
            workers.append(os.fork())
            if not workers[-1]:
                _compile(cases[first::cores], device)
                os._exit(0)
        while workers and time.monotonic() < end:
            workers = [pid for pid in workers if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            time.sleep(0.05)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _compile(cases: list[tuple[str, dict[str, Any], int]], device: str) -> None:
    import torch

    torch._inductor.config.compile_threads = 1
    torch.set_num_threads(1)  # the others use the other cores
    for name, params, at in cases:
        try:
            for call in _calls(_compiled(name, params, device)[at]):
                call()
            torch.cuda.synchronize()
        except Exception as error:  # the part meets it too, and says so
            said = f"compiling {name} {at}: {type(error).__name__}: {error}"[:200]
            print(said, file=sys.stderr, flush=True)


def _compiled(name: str, params: dict[str, Any], device: str) -> list[Any]:
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


def _calls(case: Any) -> list[Callable[[], object]]:
    """What a case compiles, by being called."""
    if hasattr(case, "workloads"):
        return [work.call for work in case.workloads(*case.inputs(0))]
    from nanolib.experiments.model.look import text_batch
    from nanolib.experiments.model.steps import Training
    from nanolib.models import fp8

    model = case.model_case.build(0)
    if case.recipe:
        fp8.convert(model, case.recipe, excluded_modules=case.keep, emulate=False)
    return [Training(model, text_batch(case, "", 0), "compile", 1e-4)]
