"""No finding on FP8 claims more than its intervals."""

import pytest

from nanolib.measurement import Provenance
from tests.report.cases import (
    fp8_case,
    parity_case,
)
from tests.report.rows import ended


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (
            {1: 4, 2: 4, 4: 4},
            "FP8 is faster than bf16 for size 1, size 2 and size 4: up to 2.00× [1.40 … 3.00] as fast, for size",
        ),
        (
            {1: 8, 2: 4, 4: 4},
            "FP8 is faster than bf16 for size 2 and size 4: up to 2.00× [1.40 … 3.00] as fast, for size",
        ),
        (
            {1: 8, 2: 8, 4: 8},
            "No clear difference between FP8 and bf16 for size 1, size 2 and size 4: up to 1.00× [0.778 … 1.29] as fast",
        ),
        (
            {1: 16, 2: 16, 4: 16},
            "FP8 is slower than bf16 for size 1, size 2 and size 4: up to 0.500× [0.412 … 0.600] as fast",
        ),
    ],
)
def test_fp8_is_faster_at_sizes_where_its_whole_range_is_above_one(say, times, said):
    cases = []
    for size in (4, 1, 2):
        cases.append(fp8_case(size, "bfloat16", 7, 8, 9))
        cases.append(
            fp8_case(
                size, "fp8_rowwise", {4: 3, 8: 7, 16: 15}[times[size]], times[size], times[size] + 1
            )
        )
    line = say("fp8", cases)[0]
    assert line.startswith(f"Inference: {said}")
    assert ("The upper bound by Amdahl's law is 1.75×." in line) == ("FP8 is faster" in line)
    rest = ". No clear difference between FP8 and bf16 for size 1."
    assert line.endswith(rest) == ("FP8 is faster" in line and times[1] == 8)


@pytest.mark.parametrize(
    ("endings", "said"),
    [
        (
            [("unsupported", "no tensor cores"), ("oom", "too large")],
            "FP8 speed was not measured: no tensor cores.",
        ),
        ([("error", "")], "FP8 speed was not measured: no FP8 case was completed."),
    ],
)
def test_why_fp8_gives_no_time_is_said_with_the_first_reason(say, endings, said):
    cases = [fp8_case(1, "bfloat16", 7, 8, 9)]
    for size, (status, message) in enumerate(endings, 1):
        factors, _ = fp8_case(size, "fp8_rowwise", 1, 2, 3)
        cases.append((factors, [ended(status, message)]))
    assert say("fp8", cases)[0].startswith(said)


def test_parity_is_told_with_its_pairs_and_a_control_that_was_not_found_worse_takes_the_trust(say):
    recipe = parity_case("row_wise", "equivalent", 0.0005, provenance=Provenance.EMULATED)
    lines = say("fp8", [recipe, parity_case("off_by_2", "worse", 0.5, control=True)])
    assert lines[0] == (
        "row wise (emulated) has a loss equivalent to bf16 after 400 steps: 5.00e-04 [-0.00150 … 0.00150] "
        "nats/byte above bf16, with a margin of ±0.0025 and 3 seeds."
    )
    assert not any("known-bad" in line for line in lines)
    lines = say("fp8", [recipe, parity_case("off_by_2", "inconclusive", 0.5, control=True)])
    assert any("did not detect the known-bad recipe off by 2: an" in line for line in lines)
