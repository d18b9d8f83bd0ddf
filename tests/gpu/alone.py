"""A part of the first minutes in a process of its own: what hangs, crashes or loses its device costs its own limit alone.

The processes are forked from this one, which has imported torch and has touched no GPU.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback

import torch

from nanolib.measurement import cause
from nanolib.meters.machine import this_machine, versions
from nanolib.run.process import exit_with_parent
from nanolib.run.provenance import git_revision
from tests.gpu.hardware import DENSE, OWN_KERNELS, RANDOM, Hardware
from tests.gpu.null_cuda.build import REHEARSAL

_FORKS = multiprocessing.get_context("fork")
_GRACE_S = 5.0  # a sweep that is interrupted marks its run


class PartFailed(Exception):
    """It broke, died, or took too long; the message says which."""


def messages(target, limit_s):
    """What a process of its own sends; the last is its CPU seconds.

    Args:
        target: Called there with a function that sends a message.
        limit_s: Then it is stopped.

    Raises:
        PartFailed: As it says.
    """
    receiving, sending = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(target, sending))
    end = time.monotonic() + limit_s
    process.start()
    sending.close()
    try:
        while receiving.poll(max(0.0, end - time.monotonic())):
            message = receiving.recv()
            if isinstance(message, PartFailed):
                raise message
            yield message
            if isinstance(message, float):  # its last word
                process.join(_GRACE_S)
                return
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


def _run(target, sending):
    os.setsid()  # it is stopped with all that it has started
    exit_with_parent(os.getppid())  # else this keeps the GPU
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a pool ends its processes by it, at once
    faulthandler.enable()
    try:
        target(sending.send)
        sending.send(sum(os.times()[:4]))  # its own, and its children's
    except BaseException as error:  # an interrupt too, which nobody listens to
        traceback.print_exc()
        sending.send(PartFailed(cause(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads and compilers are not waited for


def send_part(send, checks, folder):
    """Send the checks of a part as they come.

    Args:
        send: Sends one.
        checks: Asks them of a GPU.
        folder: Of the database.
    """
    if REHEARSAL in os.environ:
        _rehearse()
    for check in checks(Hardware(folder)):
        send(check)


def _rehearse():
    """Leave out what cannot run where nothing is computed.

    These are kernels that cuDNN builds or that look for their own code, and torchao's check of its scales.
    """
    from torchao.float8 import float8_utils

    torch.backends.cuda.enable_cudnn_sdp(False)
    float8_utils._round_scale_down_to_power_of_2 = lambda scale: scale
    flash, *others = DENSE
    kinds = [kind for kind in Hardware.patterns["attention_types"] if kind not in others]
    Hardware.patterns |= {"attention_types": kinds, "backward": False}
    # a core compiles each shape, density and block anew, in half a minute: one of each, and one width, show as much
    kinds = [flash, OWN_KERNELS[-1], RANDOM[-1]]
    Hardware.grid |= {"attention_types": kinds, "seq_lens": [4096]}
    Hardware.fp8_sizes = [Hardware.fp8_sizes[2] | {"overrides": {"num_layers": 1}}]


def send_identity(send):
    """Send what torch calls the GPU, and the versions of what makes its numbers."""
    send({"gpu": this_machine().gpus[0]["name"], **versions(), "nanolib": git_revision()})
