"""Tensors without a plain storage, and layers that a call runs several times or never."""

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from nanolib.measurement import BadInput
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.memory import peak_memory
from nanolib.meters.tensor_bytes import storage_bytes


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


def test_a_compiled_model_is_refused_in_one_line():
    model = nn.Linear(2, 2)
    LayerProfiler(model)
    with pytest.raises(BadInput, match="a compiled model cannot be profiled; give the eager model"):
        LayerProfiler(torch.compile(model))
