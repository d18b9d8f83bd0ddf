"""No finding on FP8 claims more than its intervals."""

from nanolib.measurement import Provenance
from tests.report.cases import fp8_case, parity_case
from tests.report.rows import ended, points
from tests.shown import CHARTS


def _said(say, *speeds):
    """The finding on sizes 1, 2, …, each with the times of bf16 and of FP8 with its ends."""
    cases = []
    for size, (low, ms, high) in enumerate(speeds, 1):
        cases += [fp8_case(size, "bfloat16", 7, 8, 9), fp8_case(size, "fp8_rowwise", low, ms, high)]
    return say("fp8", cases)[0]


def test_fp8_is_faster_only_at_the_sizes_whose_whole_range_is_above_one(say):
    wide, sure = (0.5, 2.6, 16), (5.5, 6, 6.5)  # the first has the larger ratio
    assert _said(say, wide, sure) == (
        "Inference: FP8 is faster than bf16 for size 2: up to 1.33× [1.08 … 1.64] as fast, for "
        "size 2 in fp8_rowwise, within the upper bound of 1.75× by Amdahl's law."
    )


def test_a_speed_up_above_its_bound_is_said_to_be_so(say):
    line = _said(say, (1, 2, 3))
    assert "This is above the upper bound of 1.75× by Amdahl's law" in line
    assert "Next: compare the shares of the peak rate" in line


def test_why_fp8_gives_no_time_is_said(say):
    factors, _ = fp8_case(1, "fp8_rowwise", 1, 2, 3)
    reasons = [(factors, [ended("unsupported", "no tensor cores")]), (factors, [ended("oom", "")])]
    assert say("fp8", reasons)[0] == "FP8 speed was not measured: no tensor cores."
    why = "FP8 speed was not measured: no FP8 case was completed."
    assert say("fp8", reasons[1:])[0] == why


def test_parity_is_told_with_its_pairs_and_a_control_that_was_not_found_worse_takes_the_trust(
    say, measured
):
    recipe = parity_case("row_wise", "equivalent", 0.0005, provenance=Provenance.EMULATED)
    lines = say("fp8", [recipe, parity_case("off_by_2", "worse", 0.5, control=True)])
    assert lines[0] == (
        "row wise (emulated) has a loss equivalent to bf16 after 400 steps: 5.00e-04 "
        "[-0.00150 … 0.00150] nats/byte above bf16, with a margin of ±0.0025 and 3 seeds."
    )
    assert not any("known-bad" in line for line in lines)
    lines = say("fp8", [recipe, parity_case("off_by_2", "inconclusive", 0.5, control=True)])
    assert any("did not detect off by 2 as known-bad: these" in line for line in lines)
    assert points(CHARTS["fp8_parity"](measured("fp8", [recipe])), "sure") == [(False,)]


def test_the_band_is_the_margin_of_all_rows_or_it_is_left_out(measured):
    def colours(*margins):
        cases = [parity_case(f"at {each}", "worse", 0.5, margin=each) for each in margins]
        return str(CHARTS["fp8_parity"](measured("fp8", cases)).to_dict())

    assert "Green: the margin" in colours(0.0025, 0.0025)
    assert "Green: the margin" not in colours(0.0025, 0.005)
