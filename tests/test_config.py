import pytest

from nanolib import PRESETS, NanoConfig, create_model
from nanolib.measurement import BadInput

# From the shapes: to the digit, and large as the size is quoted.
QUOTED = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969.4e6,
    "xl": 1_998_235_200,
    "2.7B": 3_406_809_600,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_is_that_of_the_model(name):
    config = NanoConfig.from_preset(name)
    assert (
        sum(p.numel() for p in create_model(config, "meta").parameters()) == config.parameter_count
    )


@pytest.mark.parametrize(("name", "count"), QUOTED.items())
def test_presets_have_the_quoted_sizes(name, count):
    got = NanoConfig.from_preset(name).parameter_count
    assert got == count if isinstance(count, int) else got == pytest.approx(count, rel=5e-4)


def test_assignment_is_validated_and_refused_whole():
    config = NanoConfig()
    config.attention_type = "sparse"
    assert config.attention_type == "sparse"
    with pytest.raises(BadInput, match=r"config\.num_heads: 7 does not divide d_model 512"):
        config.num_heads = 7
    assert config.num_heads == 8


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"attention_type": "spare"},
            "config.attention_type: 'spare' is not a known attention kind; use one of",
        ),
        ({"d_model": 0}, "config.d_model: Input should be greater than 0, got 0"),
        ({"d_model": True}, "config.d_model: True is not valid; give a number"),
        ({"num_kv_heads": 3}, "config.num_kv_heads: 3 does not divide num_heads 8"),
        ({"n_layers": 2}, "config.n_layers: unknown name; did you mean num_layers?"),
        (
            {"vocab_size": 10**12},
            "config.vocab_size: Input should be less than or equal to 10000000, got 1000000000000",
        ),
    ],
)
def test_a_bad_value_is_one_line_that_names_field_value_and_remedy(values, said):
    with pytest.raises(BadInput) as caught:
        NanoConfig(**values)
    assert len(caught.value.lines) == 1
    assert caught.value.lines[0].startswith(said)


def test_an_unknown_preset_is_told():
    with pytest.raises(BadInput, match="preset: 'smal' is not known; use one of decoder_nano"):
        NanoConfig.from_preset("smal")
