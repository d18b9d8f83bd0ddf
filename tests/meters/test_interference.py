import os
from types import SimpleNamespace

import pytest

from nanolib.meters import interference
from nanolib.meters.gpu import gpu_interference
from nanolib.meters.interference import CpuTimes, load_between


def _load(spent, own):
    return load_between(CpuTimes(dict.fromkeys(spent, 0.0), 0.0, {}), CpuTimes(spent, own, {}))


@pytest.mark.parametrize(
    ("spent", "own", "said"),
    [
        ({"idle": 10.0}, 0.0, []),
        ({"user": 1.0, "system": 2.0, "idle": 7.0}, 0.5, ["other processes use 25% of the CPUs"]),
        (
            {"steal": 1.0, "user": 4.0, "idle": 5.0},
            0.0,
            [
                "other processes use 40% of the CPUs",
                "a hypervisor takes 10% of the CPU time (steal)",
            ],
        ),
        (
            {"idle": 0.0},
            0.0,
            ["the load by other processes is not known: this system counts no CPU time"],
        ),
    ],
)
def test_load_and_steal_of_others_are_told_in_words(spent, own, said):
    assert interference.cpu_interference(_load(spent, own)) == said


class _Nvml:
    """A GPU as NVML tells of it; what is not given is not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self, **answers):
        self.answers = answers

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-a":
            raise self.NVMLError("not found")
        return uuid

    def __getattr__(self, name):
        if name not in self.answers:
            raise self.NVMLError("not supported")
        return lambda handle: self.answers[name]


QUIET = {
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0),
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,  # idle
}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (QUIET, []),
        ({}, []),
        (
            QUIET
            | {
                "nvmlDeviceGetComputeRunningProcesses": [
                    SimpleNamespace(pid=pid) for pid in (-1, os.getpid(), -2)
                ]
            },
            ["2 other process(es) compute on the GPU"],  # ones own work is no disturbance
        ),
        (QUIET | {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=10)}, []),
        (
            QUIET | {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=11)},
            ["the GPU's utilization is 11 %"],
        ),
        (
            QUIET | {"nvmlDeviceGetEnforcedPowerLimit": 300_700},
            ["the GPU's power is capped at 301 of 700 W"],
        ),
        (
            QUIET
            | {"nvmlDeviceGetCurrentClocksThrottleReasons": 0x08 | 0x20 | 0x40 | 0x80 | 0x4 | 0x2},
            [
                "the GPU's clock is lowered by hardware slowdown, heat, heat, in hardware, power brake"
            ],
        ),
    ],
)
def test_what_else_a_gpu_does_is_told(answers, said):
    assert gpu_interference("GPU-a", _Nvml(**answers)) == said


def test_a_gpu_that_cannot_be_asked_is_told():
    assert gpu_interference("GPU-b", _Nvml()) == ["other work on the GPU is not known (not found)"]
