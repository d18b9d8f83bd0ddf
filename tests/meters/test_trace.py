import json

import pytest
import torch
from torch.profiler import ProfilerActivity

from nanolib.meters.layers import operations
from nanolib.meters.layers.operations import write_trace


def test_a_trace_tells_each_operation_with_its_shapes_and_memory(tmp_path):
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    calls = []

    def call():
        calls.append(1)
        return torch.softmax(a @ b, dim=-1)

    write_trace(call, tmp_path / "case.json")
    events = json.loads((tmp_path / "case.json").read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == len(calls) - 1  # the first call is not traced
    assert products[0]["args"]["Input Dims"][:2] == [[8, 16], [16, 4]]
    assert any(event.get("name") == "[memory]" for event in events)


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
def test_a_gpus_kernels_are_traced_where_there_is_one(tmp_path, monkeypatch, device):
    asked = []

    def profile(activities, **options):
        asked.extend(activities)
        return torch.profiler.profile(activities=[ProfilerActivity.CPU], **options)

    monkeypatch.setattr(operations, "profile", profile)
    write_trace(lambda: torch.ones(2) + 1, tmp_path / "case.json", device)
    assert asked == [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * device.startswith("cuda")]
