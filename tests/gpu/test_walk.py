"""What the full parameters can ask of a GPU, on simulated ones: it stays there, fits its plan, and never waits for the host."""

import functools
import json
import re

import pytest

from nanolib.models.attention.choice import CHOOSERS
from tests.gpu.simulated import needs_compiler, run_python

pytestmark = [needs_compiler, pytest.mark.slow]

# What cannot be planned, or has no kernel: a reason that is not here fails.
KNOWN = (
    r"SDPA backend (flash|cudnn) has no kernel for torch\.float(32|64)",
    r"SDPA backend efficient has no kernel for torch\.float64",
    r"flash_attn is not installed",
    r"a compiled kernel allocates out of the counter's sight",
    r"to plan it would warm the process",
    r"its memory is told without running it",
)
# Most operations of a second call on a model of one block, or on 64 tokens; what exceeds them has become a loop in Python.
OPERATIONS = {
    "AttentionCase": {"forward": 30, "forward_backward": 100},
    "ModelCase": {"inference": 200, "training_step": 650},
    "GenerationCase": {"prefill": 115, "decode": 65},
    "EnergyCase": {"prefill": 55, "decode": 55, "training_step": 290},
    "SpeedCase": {"inference": 85, "training_step": 290},
    "ParityCase": {"training_step": 290},
    "NumericsCase": {"training_step": 290},
    "QualityCase": {"training_step": 290},
    "ShardedTrainingCase": {"training_step": 310},
    "PrefillCase": {"forward": 310, "training": 900},
    "MemoryCase": {"forward": 40},
}


@functools.cache
def _walked(name):
    return [json.loads(line) for line in run_python("-m", "tests.gpu.walk", name).splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", ["attention", "distributed", "fp8"])
def test_every_case_stays_on_its_gpu_and_fits_its_plan(name):
    cases = _walked(name)
    assert cases
    for case in cases:
        # a single block of queries follows its keys in a loop, which knows on the host alone which are chosen
        reads = [word for word in CHOOSERS if f"{word} " in case["case"]]
        assert case["planned"] or any(re.match(known, case["reason"]) for known in KNOWN) or reads, case
        for call in case["calls"]:
            assert not call["copies"] and not call["read"], case
            assert call["cpu"] is None or call["peak"] <= 1.5 * call["cpu"], case
            bounds = OPERATIONS[case["kind"]]
            assert call["operations"] <= bounds[call["scope"].split()[-1]], case
    assert any(case["calls"] for case in cases)
