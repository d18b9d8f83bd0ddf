"""What kernels of a GPU would be asked for, on tensors that have no data: memory, devices, and nothing copied to the host."""

import json

import pytest

from tests.gpu.simulated import needs_compiler, run

pytestmark = [needs_compiler, pytest.mark.slow]

_RING = """
import json, torch
from nanolib.meters.memory import LiveBytes, fake_tensors
from nanolib.models.attention.ring import block_gradients

def peak(device, dtype, n):
    with fake_tensors():
        q, k, v, out, grad = (torch.empty(1, 8, n, 64, dtype=dtype, device=device) for _ in range(5))
        lse = torch.empty(1, 8, n, device=device)
        with LiveBytes() as counter:
            counter.watch(q, k, v, out, grad, lse)
            found = block_gradients(grad, q, k, v, out.float(), lse, True, 0.125)
            assert all(x.device.type == device for x in found)
    return counter.peak

print(json.dumps([peak(device, torch.DTYPE, 16384) for device in ("cuda", "cpu")]))
"""


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.thorough), "bfloat16"])
def test_the_gradients_of_a_ring_need_at_most_twice_what_they_need_on_a_cpu(dtype):
    on_cuda, on_cpu = json.loads(run(_RING.replace("DTYPE", dtype)))
    assert on_cuda <= 2 * on_cpu, (on_cuda / 2**20, on_cpu / 2**20)


_MASKED = """
import json, torch
from nanolib.meters.memory import LiveBytes, fake_tensors
from nanolib.models.attention.partial import partial_attention

with fake_tensors():
    q = torch.empty(1, 8, 4, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.empty(1, 8, 65536, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    mask = torch.empty(4, 65536, dtype=torch.bool, device="cuda")
    with LiveBytes() as counter:
        out, lse = partial_attention(q, k, v, mask=mask)
    print(json.dumps([counter.peak, k.nbytes, out.device.type, lse.device.type]))
"""


def test_a_few_masked_queries_do_not_widen_the_whole_cache():
    peak, cache, *devices = json.loads(run(_MASKED))
    assert devices == ["cuda", "cuda"] and peak < cache / 2


_KINDS = """
import json, torch
from torch.utils._python_dispatch import TorchDispatchMode
from nanolib.meters.memory import fake_tensors
from nanolib.models import attention

class Copies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func.name() in ("aten::_local_scalar_dense",):
            found.append(func.name())
        if func.name() in ("aten::_to_copy", "aten::copy_") and isinstance(args[-1], torch.Tensor):
            devices = {x.device.type for x in (*args, out) if isinstance(x, torch.Tensor)}
            if len(devices) > 1:
                found.append(func.name())
        return out

told = {}
for kind, options in json.loads(KINDS):
    with fake_tensors():
        q = torch.empty(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        for call in range(2):
            found = []
            with Copies():
                out = attention.attend(kind, q, k, v, causal=True, options=options)
                grads = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        assert {x.device.type for x in (out, *grads)} == {"cuda"} and [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    told[f"{kind} {options}"] = found
print(json.dumps(told))
"""
DENSE = [["dense", {"backend": backend}] for backend in ("flash", "math", "efficient")]


def test_dense_attention_stays_on_its_device_and_tells_the_host_nothing():
    told = json.loads(run(f"KINDS = {json.dumps(DENSE)!r}\n" + _KINDS))
    assert len(told) == len(DENSE) and not any(told.values())
