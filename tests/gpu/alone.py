"""What a process of the first minutes sends: a part's checks as they come, and what broke it."""

import os
import traceback

import torch

from nanolib.measurement import cause
from nanolib.meters.machine import this_machine, versions
from nanolib.run.prepare import git_revision
from tests.gpu.hardware import DENSE, OWN_KERNELS, RANDOM, Hardware
from tests.gpu.null_cuda.build import REHEARSAL
from tests.gpu.parts import PARTS


def send_part(send, name, folder):
    """Send the checks of a part, and as its last word what broke it.

    Args:
        send: Sends one.
        name: Of the part.
        folder: Of the database.
    """
    if REHEARSAL in os.environ:
        _rehearse()
    checks, _ = PARTS[name]
    broke = ""
    try:
        for check in checks(Hardware(folder)):
            send(check)
    except Exception as error:
        traceback.print_exc()
        broke = cause(error)
    send({"broke": broke})


def _rehearse():
    """Leave out what cannot run where nothing is computed.

    These are kernels that cuDNN builds or that look for their own code, and torchao's check of
    scales.
    """
    from torchao.float8 import float8_utils

    torch.backends.cuda.enable_cudnn_sdp(False)
    float8_utils._round_scale_down_to_power_of_2 = lambda scale: scale
    flash, *others = DENSE
    kinds = [kind for kind in Hardware.patterns["attention_types"] if kind not in others]
    Hardware.patterns |= {"attention_types": kinds, "backward": False}
    # a core compiles each shape, density and block anew, in half a minute: one of each is enough
    kinds = [flash, OWN_KERNELS[-1], RANDOM[-1]]
    Hardware.grid |= {"attention_types": kinds, "seq_lens": [4096]}
    Hardware.fp8_sizes = [Hardware.fp8_sizes[2] | {"overrides": {"num_layers": 1}}]


def send_identity(send):
    """Send what torch calls the GPU, and the versions of what makes its numbers."""
    send({"gpu": this_machine().gpus[0]["name"], **versions(), "nanolib": git_revision()})
