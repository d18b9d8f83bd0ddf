from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nanolib import NanoConfig, create_model
from nanolib.measurement import BadInput
from nanolib.models import fp8
from nanolib.models.fp8.casts import EmulatedLinear, EmulatedProduct, recipe_of, round_to, scale_of


def _same(a, b):
    """Equal to the last bit, signs of zero included; NaN where NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a[~a.isnan()].view(torch.int32), b[~b.isnan()].view(torch.int32)
    )


def _torch_cast(x, format):
    largest = torch.finfo(fp8.FORMATS[format]).max
    return x.clamp(-largest, largest).to(fp8.FORMATS[format]).float()


@pytest.mark.parametrize("format", fp8.FORMATS)
def test_rounding_equals_torchs_for_every_bfloat16_and_a_million_float32(format):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=g, dtype=torch.int64)
    # also ties, subnormal numbers and the largest value
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fp8.FORMATS[format]).float()
    values = values[values.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-1e9, 1e9)]
    x = torch.cat([every, bits.to(torch.int32).view(torch.float32), values, ties, *near])
    assert _same(round_to(x, format), _torch_cast(x, format))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
@settings(max_examples=12)
@given(data=st.data())
def test_the_emulated_linear_is_torchaos_bit_for_bit(recipe, dtype, data):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    tokens, into, out = (16 * data.draw(st.integers(1, 6)) for _ in range(3))
    seed, spread = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([1e-6, 1.0, 1e4]))
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, tokens, into, generator=g) * spread).to(dtype)
    x *= torch.rand(into, generator=g).exp2().to(dtype) ** 4  # rows and columns of unlike sizes
    gradient = (torch.randn(2, tokens, out, generator=g) / spread).to(dtype)
    source = nn.Linear(into, out, bias=False, dtype=dtype)
    with torch.no_grad():
        source.weight.copy_(torch.randn(out, into, generator=g) * 0.02)

    def results(layer):
        a = x.clone().requires_grad_()
        layer.weight.grad = None
        y = layer(a)
        y.backward(gradient)
        return y.detach(), a.grad, layer.weight.grad.clone()

    theirs = results(
        Float8Linear.from_float(
            source, replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        )
    )
    ours = results(EmulatedLinear(source, fp8.RECIPES[recipe]))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_zero_tensor_survives_the_cast():
    zero = torch.zeros(16, 16)
    for recipe in fp8.RECIPES.values():
        assert torch.equal(EmulatedProduct.apply(zero, zero, recipe), zero)


def test_shares_that_vanish_and_saturate_are_counted():
    def lost(*values, **cast):
        return fp8.lost_shares(torch.tensor(values), fp8.Cast(**cast))

    assert lost(448.0, 1.0, 1e-9, 0.0) == (0.25, 0)
    assert lost(500.0, 1.0, 0.0, -600.0, scaled=False) == (0, 0.5)
    # half a step above the largest value
    for format, inside in {"e4m3": 463.0, "e5m2": 61439.0}.items():
        assert lost(inside, format=format, scaled=False) == (0, 0)
        assert lost(inside + 2, format=format, scaled=False) == (0, 1)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert all(fp8.lost_shares(x, fp8.Cast(name, "row"))[1] == 0 for name in fp8.FORMATS)


def test_an_operand_is_clamped_and_a_row_has_its_own_scale():
    x = torch.tensor([500.0, 1.0, 0.0, -600.0])
    assert fp8.round_trip(x, fp8.Cast(scaled=False)).tolist() == [448, 1, 0, -448]
    rows = torch.tensor([[1.0, 2.0], [100.0, 448.0]])
    assert scale_of(rows, fp8.Cast(granularity="row"), -1).flatten().tolist() == [224, 1]


def test_every_control_is_worse_than_the_recipe_it_spoils():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g) * 0.02
    gradient = torch.randn(64, 64, generator=g) * 1e-6

    def error(name):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        EmulatedProduct.apply(a, b, recipe_of(name)).backward(gradient)
        return (b.grad - gradient.t() @ x).norm() / (gradient.t() @ x).norm()

    least = {"e5m2_everywhere": 1.15, "no_scaling": 1.5, "scale_off_by_1024": 5}
    assert all(error(control) > factor * error("tensorwise") for control, factor in least.items())


def _model(**changes):
    return create_model(
        NanoConfig(**{"d_model": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256} | changes),
        seed=0,
    )


def test_a_converted_model_is_audited_and_keeps_its_head():
    model = _model()
    weights = {name: id(p) for name, p in model.named_parameters()}
    found = fp8.convert(model, "tensorwise")
    assert [layer.name for layer in found if not layer.converted] == ["head"]
    assert {name: id(p) for name, p in model.named_parameters()} == weights
    ids = torch.randint(256, (2, 17))
    with torch.autocast("cpu", torch.bfloat16):
        model.loss(ids).backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.dtype == p.dtype
        for p in model.parameters()
    )


def test_hooks_of_an_emulated_layer_run_once_under_autocast():
    layer, calls = EmulatedLinear(nn.Linear(16, 16), recipe_of("tensorwise")), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 16)).dtype is torch.bfloat16
    assert calls == [1]


def test_ours_and_torchaos_conversion_choose_the_same_layers():
    ours, theirs = _model(), _model()
    chosen = fp8.chosen_layers(theirs, ["head", "blocks.0.*"])
    fp8._convert_with_torchao(theirs, "rowwise", chosen, emulate=True)
    assert fp8.convert(ours, "rowwise", excluded_modules=["head", "blocks.0.*"]) == fp8.audit(
        theirs
    )
    ids = torch.randint(256, (2, 16))
    assert torch.equal(ours(ids), theirs(ids))


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ({}, {"recipe": "blockwise"}, "recipe: 'blockwise' is not known; use one of tensorwise"),
        (
            {},
            {"recipe": "rowwise", "excluded_modules": ["haed"]},
            "excluded_modules: 'haed' matches no linear layer; the model has q_proj",
        ),
        ({}, {"recipe": "rowwise", "excluded_modules": ["*"]}, "leaves no linear layer to convert"),
        (
            {"d_ff": 100},
            {"recipe": "rowwise"},
            r"excluded_modules: blocks.0.mlp.gate is 100 x 64, not a multiple of 16",
        ),
    ],
)
def test_what_cannot_be_converted_is_told_by_name_and_nothing_is_changed(model, arguments, words):
    built = _model(**model)
    with pytest.raises(BadInput, match=words):
        fp8.convert(built, **arguments)
    assert not any(layer.converted for layer in fp8.audit(built))


def test_a_layer_left_unconverted_is_refused(monkeypatch):
    class Stubborn(nn.Linear):
        pass

    monkeypatch.setattr(fp8, "native", lambda device: "")
    monkeypatch.setattr(fp8, "_convert_with_torchao", lambda model, recipe, chosen: None)
    with pytest.raises(BadInput, match=r"blocks.0.attention.q_proj.* stayed in high precision"):
        fp8.convert(_model(), "tensorwise", emulate=False)


def test_amdahls_bound():
    assert [fp8.amdahl_bound(share) for share in (0, 0.5, 1)] == pytest.approx([1, 4 / 3, 2])
