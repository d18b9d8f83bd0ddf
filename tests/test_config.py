import pytest

from nanolib import PRESETS, NanoConfig, create_model
from nanolib.measurement import BadInput

# From the shapes: to the digit, and large as the size is quoted.
QUOTED = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": pytest.approx(969.4e6, rel=5e-4),
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_of_its_model_and_as_many_as_quoted(name):
    config = NanoConfig.from_preset(name)
    count = sum(weight.numel() for weight in create_model(config, "meta").parameters())
    assert config.parameter_count == count == QUOTED.get(name, count)


def test_assignment_is_validated_and_refused_whole():
    config = NanoConfig()
    config.attention_type = "sparse"
    assert config.attention_type == "sparse"
    with pytest.raises(BadInput, match=r"config\.num_heads: 7 does not divide d_model 512"):
        config.num_heads = 7
    assert config.num_heads == 8
