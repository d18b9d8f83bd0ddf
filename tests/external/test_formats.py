"""Number formats, as their specifications define them."""

import pytest
import torch

from nanolib.models.fp8.casts import round_to


# Source: Micikevicius et al. (2022), FP8 formats for deep learning, table 1; OCP 8-bit floating
# point specification 1.0 (2023).
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
