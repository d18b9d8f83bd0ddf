import json

import torch

from nanolib.meters.trace import SORTS, write_trace


def test_a_trace_tells_each_operation_with_its_shapes_and_memory(tmp_path):
    a, b = torch.ones(8, 16), torch.ones(16, 4)
    calls = []

    def call():
        calls.append(1)
        return torch.softmax(a @ b, dim=-1)

    trace, ops = write_trace(call, tmp_path / "case", top=2)
    events = json.loads(trace.read_text())["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == len(calls) - 1  # the first call is not traced
    assert products[0]["args"]["Input Dims"][:2] == [[8, 16], [16, 4]]
    assert any(event.get("name") == "[memory]" for event in events)
    text = ops.read_text()
    assert text.startswith(f"{len(products)} calls, by self_cpu_time_total\n")
    assert sum(line.lstrip().startswith("aten::") for line in text.splitlines()) == 2  # the top two


def test_every_name_to_sort_by_is_known_to_the_profiler(tmp_path):
    for sort in SORTS:
        assert write_trace(lambda: torch.ones(2) + 1, tmp_path / sort, sort=sort)[1].exists()
