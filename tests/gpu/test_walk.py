"""What the full parameters can ask of a GPU, on simulated ones: it stays there, fits its plan, and never waits for the host."""

import functools
import json
import re

import pytest

from nanolib.models import fp8
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.tree import ALGORITHMS
from tests.gpu.simulated import needs_compiler, run_python
from tests.run.test_walk import WALK

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


@pytest.mark.parametrize("name", sorted({*WALK} - {"warmup"}))  # which must not be planned
def test_every_case_stays_on_its_gpu_and_fits_its_plan(name):
    cases = _walked(name)
    assert cases
    for case in cases:
        # a single block of queries follows its keys in a loop, which knows on the host alone which are chosen
        reads = [word for word in CHOOSERS if f"{word} " in case["case"]]
        assert case["planned"] or any(re.match(known, case["reason"]) for known in KNOWN) or reads, case
        for call in case["calls"]:
            assert not call["copies"] and not call["read"], case
            most = 2 if "float64" in case["case"] else 1.5  # which no fused kernel takes: torch keeps its weights
            assert call["cpu"] is None or call["peak"] <= most * call["cpu"], case
            bounds = OPERATIONS[case["kind"]]
            assert call["operations"] <= bounds[call["scope"].split()[-1]], case
    assert any(case["calls"] for case in cases)


@pytest.mark.parametrize("pattern", [*PATTERNS, *CHOOSERS])
def test_sparse_attention_is_one_operation_over_its_mask(pattern):
    """A mask of the shape alone is made once; a chosen one in each call, by some 60 operations of the device per part."""
    calls = {call["scope"]: call for call in _walked("sparse") if call["case"] == pattern}
    assert {*calls} == {"forward", "forward_backward"}
    choosing = 1000 if pattern in CHOOSERS else 0
    # whose rules torch traces, here alone
    for call, traced in (
        (calls["forward"], 1),
        (calls["forward_backward"], 20),
    ):
        assert call["devices"] == ["cuda:0"] and call["shapes"][0] == [1, 8, 8192, 64]
        assert not call["copies"] and not call["read"] and call["operations"] <= choosing + traced, call
        if pattern in PATTERNS:
            assert 0 < call["peaks"]["cuda:0"] <= 1.5 * call["peaks"]["cpu"], call
    assert len(calls["forward_backward"]["shapes"]) == 3


def test_fp8_is_trained_and_asked_in_every_recipe():
    calls = _walked("fp8 recipes")
    assert {(call["case"], call["scope"]) for call in calls} == {
        (recipe, scope) for recipe in fp8.RECIPES for scope in ("forward", "training_step")
    }
    for call in calls:
        assert not call["copies"] and not call["read"] and call["operations"] <= 950, call


def test_a_token_is_decoded_by_every_algorithm():
    calls = {call["case"]: call for call in _walked("decode")}
    assert {*calls} == {*ALGORITHMS}
    for call in calls.values():
        assert call["device"] == "cuda:0" and call["shape"] == [1, 4, 1, 16]
        assert not call["copies"] and not call["read"] and call["sent"] and call["operations"] <= 110, call
