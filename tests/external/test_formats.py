"""Number formats, as their specifications define them."""

import pytest
import torch

from nanolib.models.fp8.casts import round_to

# Source: Micikevicius et al. (2022), FP8 formats for deep learning, table 1; OCP 8-bit floating point specification 1.0 (2023).
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
LEAST_NORMAL = {"e4m3": 2.0**-6, "e5m2": 2.0**-14}
LEAST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
STEPS_PER_POWER = {"e4m3": 8, "e5m2": 4}  # 2^mantissa bits


@pytest.mark.parametrize("format", LARGEST)
def test_the_range_is_that_of_the_specification(format):
    largest, least = LARGEST[format], LEAST[format]
    values = torch.tensor([largest, 2 * largest, -2 * largest, least, least / 2, -least / 4])
    # half of the least number is a tie: it goes to the even one, which is zero
    assert round_to(values, format).tolist() == [largest, largest, -largest, least, 0.0, -0.0]


@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("power", [-5, 0, 3, 7])
def test_a_power_of_two_has_as_many_values_as_the_mantissa_gives(format, power):
    values = round_to(torch.linspace(2.0**power, 2.0 ** (power + 1), 4097)[:-1], format)
    between = values[values < 2.0 ** (power + 1)].unique()
    assert len(between) == STEPS_PER_POWER[format]


@pytest.mark.parametrize("format", LARGEST)
def test_below_the_least_normal_number_the_steps_stay(format):
    normal, least = LEAST_NORMAL[format], LEAST[format]
    values = round_to(torch.linspace(0, normal, 8193), format).unique()
    assert values.diff().unique().tolist() == [least] and values.max() == normal
