"""A part of the first minutes in a process of its own: what hangs, crashes or loses its device costs its own limit alone.

The processes are forked from a server that has imported torch and has touched no GPU.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from nanolib.run.process import exit_with_parent

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.gpu.parts", "nanolib.run.sweep"])
IMPORT_S = 300.0  # a busy machine imports torch in a minute
_GRACE_S = 5.0  # a sweep that is interrupted marks its run
REHEARSAL = (
    "NANOLIB_REHEARSAL"  # set where the GPU is a stand-in that computes nothing: see null_cuda
)


class PartFailed(Exception):
    """It broke, died, or took too long; the message says which."""


def messages(target, arguments, limit_s):
    """What a process of its own sends; the last is its CPU seconds.

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
            message = receiving.recv()
            if message is None:
                process.join(_GRACE_S)
                return
            if isinstance(message, PartFailed):
                raise message
            yield message
        raise PartFailed(f"stopped after {limit_s:.0f} s")
    except EOFError:
        process.join(_GRACE_S)
        raise PartFailed(f"its process ended with exit code {process.exitcode}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
            process.join(_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _run(target, arguments, sending):
    os.setsid()  # it is stopped with all that it has started
    exit_with_parent(os.getppid())  # the server, which ends with its user: else this keeps the GPU
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    try:
        target(sending.send, *arguments)
        sending.send(sum(os.times()[:4]))  # its own, and its children's
        sending.send(None)
    except BaseException as error:  # an interrupt too, which nobody listens to
        traceback.print_exc()
        sending.send(PartFailed(f"{type(error).__name__}: {error}".splitlines()[0]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads and compilers are not waited for


def send_part(send, name, store):
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
    for check in PARTS[name].checks(Hardware(Path(store))):
        send(check)


def _rehearse():
    """Leave out what cannot run where nothing is computed.

    These are kernels that cuDNN builds or that look for their own code, and torchao's check of its scales.
    """
    import torch
    from torchao.float8 import float8_utils

    from tests.gpu.hardware import Hardware

    torch.backends.cuda.enable_cudnn_sdp(False)
    float8_utils._round_scale_down_to_power_of_2 = lambda scale: scale
    runs = {"flash", "math", None}
    for asked in (Hardware.grid, Hardware.patterns):
        kinds = asked["attention_types"]
        asked["attention_types"] = [kind for kind in kinds if kind.get("backend") in runs]
    # a core compiles each shape, density and block anew, in half a minute: one of each, and one width, show as much
    kinds = Hardware.grid["attention_types"]
    kinds = [kind for kind in kinds if kind.get("sparsity") in (None, 0.9)]
    Hardware.grid |= {"attention_types": kinds, "seq_lens": [4096]}
    Hardware.patterns |= {"backward": False}
    Hardware.fp8_sizes = [Hardware.fp8_sizes[2] | {"overrides": {"num_layers": 1}}]


def send_identity(send):
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
