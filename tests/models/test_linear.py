import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanolib.models.linear import Linear


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
    return Linear(into, out, bias=bias, dtype=dtype)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shape", [(24,), (1, 24), (1, 1, 24), (4, 1, 24), (2, 2, 24), (5, 24), (2, 0, 24), (0, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_torchs_linear_layer_and_so_are_its_gradients(shape, bias):
    layer = _layer(bias=bias)
    x = torch.randn(shape, requires_grad=True)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert layer(x).shape == expected.shape and torch.allclose(layer(x), expected, atol=1e-6)
    inputs = (x, *layer.parameters())
    found, wanted = (torch.autograd.grad(y.sin().sum(), inputs) for y in (layer(x), expected))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def _is_divided(layer, x, threads=2):
    torch.set_num_threads(threads)
    with _Operations() as seen, torch.no_grad():
        layer(x)
    return "bmm" in seen.names


@pytest.mark.usefixtures("two_threads")
def test_few_rows_are_divided_among_threads_and_nothing_else_is():
    assert _is_divided(_layer(), torch.randn(1, 1, 24)) and _is_divided(_layer(), torch.randn(4, 24))
    assert not _is_divided(_layer(), torch.randn(5, 24))
    assert not _is_divided(_layer(out=9), torch.randn(1, 24))
    assert not _is_divided(_layer(), torch.randn(1, 24), threads=1)
    assert not _is_divided(_layer(dtype=torch.float64), torch.randn(1, 24, dtype=torch.float64))
    assert not _is_divided(_layer(dtype=torch.bfloat16), torch.randn(1, 24, dtype=torch.bfloat16))
    turned = _layer()
    turned.weight = nn.Parameter(torch.randn(24, 10).t())
    assert not _is_divided(turned, torch.randn(1, 24))
    with torch.autocast("cpu", torch.bfloat16):
        assert not _is_divided(_layer(), torch.randn(1, 24))
        assert _layer()(torch.randn(1, 24)).dtype == torch.bfloat16


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [1, 16])
def test_it_compiles_in_one_graph(rows):
    layer, x = _layer(), torch.randn(rows, 24)
    assert torch.allclose(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x), atol=1e-6)
