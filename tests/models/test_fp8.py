from dataclasses import replace

import pytest
import torch
from torch import nn

from nanolib import NanoConfig, create_model
from nanolib.models import fp8
from nanolib.models.fp8.casts import FORMATS, EmulatedLinear, EmulatedProduct, recipe_of, round_to
from nanolib.models.training import next_token_loss


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_equals_torchs_for_every_bfloat16_and_the_float32_beside_it(name):
    """To the last bit, with signs of zero and NaN. All values and ties are among them."""
    format = FORMATS[name]
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    ends = (torch.full_like(every, end) for end in (-torch.inf, torch.inf))
    x = torch.cat([every, *(torch.nextafter(every, end) for end in ends)])
    largest = torch.finfo(format).max
    theirs, ours = x.clamp(-largest, largest).to(format).float(), round_to(x, name)
    assert torch.equal(ours.isnan(), theirs.isnan())
    ours, theirs = (found[~theirs.isnan()].view(torch.int32) for found in (ours, theirs))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", fp8.RECIPES)
@pytest.mark.parametrize("spread", [1e-6, 1.0, 1e4])
def test_the_emulated_linear_is_torchaos_bit_for_bit(recipe, dtype, spread):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    tokens, into, out = 48, 96, 80
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(2, tokens, into, generator=g) * spread).to(dtype)
    x *= torch.rand(into, generator=g).exp2().to(dtype) ** 4  # rows and columns of unlike sizes
    gradient = (torch.randn(2, tokens, out, generator=g) / spread).to(dtype)
    source = nn.Linear(into, out, bias=False, dtype=dtype)
    nn.init.normal_(source.weight, std=0.02, generator=g)

    def results(layer):
        a = x.clone().requires_grad_()
        y = layer(a)
        return y.detach(), *torch.autograd.grad(y, (a, layer.weight), gradient)

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = results(Float8Linear.from_float(source, config))
    ours = results(EmulatedLinear(source, fp8.RECIPES[recipe]))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_zero_tensor_survives_the_cast():
    zero = torch.zeros(16, 16)
    assert torch.equal(EmulatedProduct.apply(zero, zero, recipe_of("tensorwise")), zero)


def test_every_control_is_worse_than_the_recipe_it_spoils():
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g) * 0.02
    gradient = torch.randn(64, 64, generator=g) * 1e-6

    def error(name):
        weight = w.clone().requires_grad_()
        EmulatedProduct.apply(x, weight, recipe_of(name)).backward(gradient)
        return (weight.grad - gradient.t() @ x).norm()

    least = {"e5m2_everywhere": 1.15, "no_scaling": 1.5, "scale_off_by_1024": 5}
    assert all(error(control) > factor * error("tensorwise") for control, factor in least.items())


def _model(**changes):
    sizes = {"d_model": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
    return create_model(NanoConfig(**sizes | changes), seed=0)


def test_a_converted_model_is_audited_and_keeps_its_head():
    model = _model()
    weights = {name: id(p) for name, p in model.named_parameters()}
    found = fp8.convert(model, "tensorwise", emulate=True)
    assert [name for name, converted in found.items() if not converted] == ["head"]
    assert {name: id(p) for name, p in model.named_parameters()} == weights
    with torch.autocast("cpu", torch.bfloat16):
        next_token_loss(model, torch.randint(256, (2, 17))).backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in model.parameters())


def test_an_emulated_layer_obeys_autocast():
    layer = EmulatedLinear(nn.Linear(16, 16), recipe_of("tensorwise"))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 16)).dtype is torch.bfloat16


def test_ours_and_torchaos_conversion_choose_the_same_layers():
    ours, theirs, excluded = _model(), _model(), ["head", "blocks.0.*"]
    fp8._convert_with_torchao(theirs, "rowwise", fp8.chosen_layers(theirs, excluded), emulate=True)
    assert fp8.convert(ours, "rowwise", emulate=True, excluded_modules=excluded) == fp8.audit(
        theirs
    )
    ids = torch.randint(256, (2, 16))
    assert torch.equal(ours(ids), theirs(ids))


class _Encoder(nn.Module):
    """A transformer of torch, with one more layer whose weight is read without a call."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.read = nn.Linear(32, 32)

    def forward(self, x):
        return nn.functional.linear(self.stack(x), self.read.weight)


def test_a_layer_counts_as_run_in_fp8_only_if_a_call_runs_it():
    model, x = _Encoder().eval(), torch.randn(2, 8, 32)
    with torch.no_grad():
        before = model.stack(x)
    audit = fp8.convert(model, "tensorwise", excluded_modules=(), emulate=True)
    assert all(audit.values()) and {"read", "stack.layers.0.self_attn.out_proj"} < {*audit}
    rows = fp8.rows_by_layer(model, lambda: model(x))
    assert rows == {f"stack.layers.{i}.linear{j}": 2 * 8 for i in (0, 1) for j in (1, 2)}
    with torch.no_grad():  # without hooks, torch's fast path would read the weights
        assert not torch.equal(model.stack(x), before)
