"""No finding on FP8 claims more than its intervals."""

import pytest

from nanolib.measurement import Provenance
from tests.report.cases import fp8_case, parity_case
from tests.report.rows import ended, points
from tests.shown import CHARTS

REST = ". No clear difference between FP8 and bf16 for size 1."


@pytest.mark.parametrize(
    ("smallest", "others", "said"),
    [
        (8, 4, "FP8 is faster than bf16 for size 2 and size 4: up to 2.00× [1.40 … 3.00] as fast, for size"),
        (8, 8, "No clear difference between FP8 and bf16 for size 1, size 2 and size 4: up to 1.00×"),
        (16, 16, "FP8 is slower than bf16 for size 1, size 2 and size 4: up to 0.500× [0.412 … 0.600]"),
    ],
)  # fmt: skip
def test_fp8_is_faster_at_sizes_where_its_whole_range_is_above_one(say, smallest, others, said):
    cases = []
    for size, ms in ((4, others), (1, smallest), (2, others)):
        cases.append(fp8_case(size, "bfloat16", 7, 8, 9))
        cases.append(fp8_case(size, "fp8_rowwise", ms - 1, ms, ms + 1))
    line = say("fp8", cases)[0]
    assert line.startswith(f"Inference: {said}") and line.endswith(REST) == (smallest > others)
    assert ("The upper bound by Amdahl's law is 1.75×." in line) == ("FP8 is faster" in line)


def test_why_fp8_gives_no_time_is_said(say):
    factors, _ = fp8_case(1, "fp8_rowwise", 1, 2, 3)
    reasons = [(factors, [ended("unsupported", "no tensor cores")]), (factors, [ended("oom", "")])]
    assert say("fp8", reasons)[0] == "FP8 speed was not measured: no tensor cores."
    why = "no FP8 case was completed"
    assert say("fp8", reasons[1:])[0] == f"FP8 speed was not measured: {why}."


def test_parity_is_told_with_its_pairs_and_a_control_that_was_not_found_worse_takes_the_trust(
    say, measured
):
    recipe = parity_case("row_wise", "equivalent", 0.0005, provenance=Provenance.EMULATED)
    lines = say("fp8", [recipe, parity_case("off_by_2", "worse", 0.5, control=True)])
    assert lines[0] == (
        "row wise (emulated) has a loss equivalent to bf16 after 400 steps: 5.00e-04 [-0.00150 … 0.00150] "
        "nats/byte above bf16, with a margin of ±0.0025 and 3 seeds."
    )
    assert not any("known-bad" in line for line in lines)
    lines = say("fp8", [recipe, parity_case("off_by_2", "inconclusive", 0.5, control=True)])
    assert any("did not detect off by 2 as known-bad: these" in line for line in lines)
    assert points(CHARTS["fp8_parity"](measured("fp8", [recipe])), "sure") == [(False,)]
