"""Tensors without a plain storage, and layers that a call runs several times or never."""

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from nanolib.measurement import BadInput
from nanolib.meters.layers import LayerProfiler
from nanolib.meters.memory import peak_memory, storage_bytes

from .test_layers import values_of


def test_quantized_weights_hold_their_packed_data():
    model = nn.Sequential(nn.Linear(256, 256, bias=False))
    assert storage_bytes(model.parameters()) == 4 * 256**2
    quantize_(model, Int8WeightOnlyConfig())
    assert 256**2 < storage_bytes(model.parameters()) < 1.1 * 256**2


def test_sparse_tensors_do_not_stop_the_count():
    table = nn.Embedding(64, 8, sparse=True)
    with peak_memory() as peak:
        table(torch.tensor([1, 2])).sum().backward()
        torch.eye(16).to_sparse()
    assert peak.live >= 4 * 16**2


class _Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


def test_a_tensor_in_float8_has_no_statistics_and_does_not_end_the_call():
    """Neither as the output of a module, nor as the input of the last layer of an MLP."""
    dtypes = torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32
    model = nn.Sequential(*map(_Cast, dtypes[:-1]))
    model.add_module("down", _Cast(dtypes[-1]))
    with LayerProfiler(model, deep_profiling=True, every_kth_token=1) as profiler:
        model(torch.tensor([[-3.0, 1.0]]))
    assert not values_of(profiler, "model") and not values_of(profiler, "3")
    for name in ("0", "1", "2", "down"):
        assert values_of(profiler, name) == {
            "mean_abs": [2],
            "sd": [pytest.approx(8**0.5)],
            "max_abs": [3],
            "near_zero": [0],
        }


def test_a_compiled_model_is_refused_in_one_line():
    with pytest.raises(BadInput, match="a compiled model cannot be profiled; give the eager model"):
        LayerProfiler(torch.compile(nn.Linear(2, 2)))
