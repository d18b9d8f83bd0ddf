import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanolib import NanoConfig, create_model
from nanolib.measurement import Unsupported
from nanolib.meters.flops import count_flops
from nanolib.models.onednn_linear import OneDnnLinear, with_onednn


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _layer(into=24, out=10, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    return OneDnnLinear(into, out, bias=bias, dtype=dtype)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (4, 1, 24), (2, 2, 24), (17, 24), (2, 0, 24), (0, 24)])
@pytest.mark.parametrize("out", [10, 9, 48])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_torchs_linear_layer_and_so_are_its_gradients(shape, out, bias):
    layer = _layer(out=out, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    with torch.no_grad():
        found = layer(x)
    assert found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)
    inputs = (x, *layer.parameters())
    found, wanted = (torch.autograd.grad(y.sin().sum(), inputs) for y in (layer(x), expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def _kernel(layer, x, threads=2):
    """What multiplies: MKL's batch, oneDNN, or torch's own choice."""
    torch.set_num_threads(threads)
    with _Operations() as seen, torch.no_grad():
        layer(x)
    if "_linear_pointwise" in seen.names:
        return "oneDNN"
    return "parts" if "bmm" in seen.names else "torch"


onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@onednn
@pytest.mark.usefixtures("two_threads")
def test_products_in_float32_go_to_onednn_or_to_all_cores_and_nothing_else_does():
    assert _kernel(_layer(), torch.randn(1, 1, 24)) == "parts"
    assert _kernel(_layer(out=48), torch.randn(1, 1, 24)) == "oneDNN"
    assert _kernel(_layer(), torch.randn(2, 24)) == _kernel(_layer(), torch.randn(16, 24)) == "oneDNN"
    assert _kernel(_layer(), torch.randn(17, 24)) == "oneDNN"
    assert _kernel(_layer(out=9), torch.randn(1, 24)) == "torch"
    assert _kernel(_layer(), torch.randn(1, 24), threads=1) == "torch"
    assert _kernel(_layer(dtype=torch.float64), torch.randn(2, 24, dtype=torch.float64)) == "torch"
    assert _kernel(_layer(dtype=torch.bfloat16), torch.randn(1, 24, dtype=torch.bfloat16)) == "torch"
    turned = _layer()
    turned.weight = nn.Parameter(torch.randn(24, 10).t())
    assert _kernel(turned, torch.randn(1, 24)) == "torch"
    with torch.autocast("cpu", torch.bfloat16):
        assert _kernel(_layer(out=48), torch.randn(1, 24)) == "torch"
        assert _layer(out=48)(torch.randn(1, 24)).dtype == torch.bfloat16


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("rows", "out"), [(1, 10), (1, 48), (3, 10), (17, 10)])
def test_flops_are_counted_whatever_multiplies(rows, out):
    layer, x = _layer(out=out), torch.randn(rows, 24)
    with torch.no_grad():
        assert count_flops(lambda: layer(x)) == 2 * rows * 24 * out


@pytest.mark.usefixtures("two_threads")
def test_its_memory_is_known_without_running():
    with FakeTensorMode(), torch.no_grad():
        assert _layer(out=48)(torch.empty(2, 24)).shape == (2, 48)


def _operations(model, ids):
    with _Operations() as seen, torch.no_grad():
        model(ids)
    return seen.names


@onednn
def test_a_model_runs_torchs_own_operations_until_it_is_asked_for_onednn():
    """In float32, whatever the number of rows: what is measured is untuned."""
    config = NanoConfig.from_preset("decoder_tiny", num_layers=2, vocab_size=64)
    model = create_model(config, seed=0).eval()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    linears = sum(type(layer) is nn.Linear for layer in model.modules())
    assert _operations(model, ids).count("_linear_pointwise") == 0
    fast = with_onednn(model, ids)
    assert _operations(fast, ids).count("_linear_pointwise") == linears
    assert _operations(model, ids).count("_linear_pointwise") == 0
    with torch.no_grad():
        assert torch.allclose(fast(ids), model(ids), atol=1e-5)


def test_the_copy_holds_the_same_weights():
    model = create_model(NanoConfig.from_preset("decoder_tiny", num_layers=2, vocab_size=64), seed=0)
    fast = with_onednn(model, torch.zeros(1, 2, dtype=torch.int64))
    for (name, a), (other, b) in zip(model.state_dict().items(), fast.state_dict().items(), strict=True):
        assert name == other and a.data_ptr() == b.data_ptr()
    assert len(list(fast.parameters())) == len(list(model.parameters()))  # a tied head stays tied


@pytest.mark.parametrize(
    "model", [nn.Embedding(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2, device="meta")]
)
def test_what_has_no_float32_layer_on_a_cpu_is_refused(model):
    with pytest.raises(Unsupported, match="float32 on a CPU"):
        with_onednn(model, torch.zeros(1, 2, dtype=torch.int64))


class _Elsewhere(nn.Module):
    """Its forward pass is that of modules which a copy does not hold."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.run = lambda ids: self.head(self.embedding(ids))

    def forward(self, ids):
        return self.run(ids)


class _Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.lock = nn.Linear(4, 8), threading.Lock()


@pytest.mark.parametrize(
    ("model", "said"), [(_Elsewhere, "goes through none of its own"), (_Locked, "cannot be copied")]
)
def test_a_model_that_oneDNN_would_not_reach_is_not_called_faster(model, said):
    with pytest.raises(Unsupported, match=said):
        with_onednn(model(), torch.zeros(1, 2, dtype=torch.int64))


def test_a_torch_without_onednn_has_no_such_optimisation(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="built without oneDNN"):
        with_onednn(nn.Linear(2, 2), torch.zeros(1, 2, dtype=torch.int64))
