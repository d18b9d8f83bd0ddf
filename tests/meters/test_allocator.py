"""What an allocator remembers: simulated events of a GPU that is not here."""

import torch

from nanolib.meters.allocator import allocated_lines, lines_at_peak


def _event(action, addr, size, *frames):
    told = [dict(zip(("filename", "line", "name"), frame, strict=True)) for frame in frames]
    return {"action": action, "addr": addr, "size": size, "frames": told}


TORCH = ("/env/site-packages/torch/nn/functional.py", 9, "linear")
EVENTS = [
    _event("free_completed", 7, 99),  # of before
    _event("segment_alloc", 1, 2**21),
    _event("alloc", 1, 100, TORCH, ("/home/me/model.py", 12, "forward")),
    _event("alloc", 2, 50, ("/home/me/model.py", 30, "loss")),
    _event("free_requested", 1, 100),
    _event("alloc", 3, 60, ("/home/me/model.py", 12, "forward")),
    _event("free_completed", 1, 100),
    _event("alloc", 1, 80),
]


def test_what_holds_most_is_what_was_alive_when_most_was():
    assert lines_at_peak(EVENTS) == {"model.py:12 forward": 160, "model.py:30 loss": 50}
    assert lines_at_peak(EVENTS[-1:]) == {"not known": 80}
    assert lines_at_peak([]) == {}


def test_the_history_is_switched_on_read_for_this_device_and_switched_off(monkeypatch):
    switched = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *a, **k: switched.append(k))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"device_traces": [[], EVENTS]})
    with allocated_lines("cuda:1") as lines:
        assert lines == [] and len(switched) == 1
    assert lines == [["model.py:12 forward", 160], ["model.py:30 loss", 50]]
    assert switched[-1] == {"enabled": None}
    try:
        with allocated_lines("cuda:1"):
            raise RuntimeError("out of memory")
    except RuntimeError:
        assert len(switched) == 4 and switched[-1] == {"enabled": None}
