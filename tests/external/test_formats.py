"""Number formats, as their specifications define them."""

import pytest
import torch

from nanolib.models.fp8.casts import Cast, round_to, round_trip, scale_of


# Source: Micikevicius et al. (2022), FP8 formats for deep learning, table 1; OCP 8-bit floating point specification 1.0 (2023).
@pytest.mark.parametrize(
    ("format", "largest", "least_normal", "least", "steps_per_power"),  # 2^mantissa bits
    [("e4m3", 448.0, 2.0**-6, 2.0**-9, 8), ("e5m2", 57344.0, 2.0**-14, 2.0**-16, 4)],
)
def test_range_and_steps_are_those_of_the_specification(
    format, largest, least_normal, least, steps_per_power
):
    values = torch.tensor([largest, 2 * largest, -2 * largest, least, least / 2, -least / 4])
    # half of the least number is a tie: it goes to the even one, which is zero
    assert round_to(values, format).tolist() == [largest, largest, -largest, least, 0.0, -0.0]
    for power in (-5, 0, 3, 7):
        values = round_to(torch.linspace(2.0**power, 2.0 ** (power + 1), 4097)[:-1], format)
        assert len(values[values < 2.0 ** (power + 1)].unique()) == steps_per_power
    # below the least normal number the steps stay
    values = round_to(torch.linspace(0, least_normal, 8193), format).unique()
    assert values.diff().unique().tolist() == [least] and values.max() == least_normal


# Source: Micikevicius et al. (2022): a tensor is scaled so that its largest magnitude becomes the format's.
@pytest.mark.parametrize(("format", "largest"), [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_the_largest_magnitude_is_scaled_to_the_formats_largest(format, largest):
    values = torch.tensor([[1.0, -3.5], [0.25, 2.0]])
    assert scale_of(values, Cast(format), -1) == largest / 3.5


# Source: Kalamkar et al. (2019), A study of bfloat16: eight bits of significand, ties to even.
def test_bfloat16_has_eight_bits_of_significand():
    values = torch.tensor([1 + 2.0**-7, 1 + 2.0**-8, 1 + 3 * 2.0**-8])
    assert round_trip(values, Cast("bf16")).tolist() == [1 + 2.0**-7, 1.0, 1 + 2.0**-6]
