import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nanolib.meters.flops import count_flops
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
def test_a_few_rows_are_multiplied_on_all_cores_and_nothing_else_is():
    assert _kernel(_layer(), torch.randn(1, 1, 24)) == "parts"
    assert _kernel(_layer(out=48), torch.randn(1, 1, 24)) == "oneDNN"
    assert _kernel(_layer(), torch.randn(2, 24)) == _kernel(_layer(), torch.randn(16, 24)) == "oneDNN"
    assert _kernel(_layer(), torch.randn(17, 24)) == "torch"
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


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("rows", [1, 2, 32])
def test_it_compiles_in_one_graph(rows):
    layer, x = _layer(), torch.randn(rows, 24)
    with torch.no_grad():
        assert torch.allclose(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x), atol=1e-6)
