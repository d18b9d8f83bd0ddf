"""Memory: live, resident, and what FlashAttention's backward pass takes beside its tensors."""

import pytest
import torch

from nanolib.measurement import Status
from nanolib.meters import memory
from nanolib.meters.memory import (
    LiveBytes,
    free_bytes,
    measure_memory,
    peak_memory,
    workspace_bytes,
)


def test_the_peak_of_a_product_and_its_gradient_is_pinned():
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64)
    one = 64 * 64 * 4

    def step():
        ((x @ w).relu() @ w).sum().backward()
        x.grad = None

    peak, again = (measure_memory(step, existing=(x, w))[0] for _ in range(2))
    assert (peak.metric, peak.estimate) == ("peak_memory", again.estimate)
    assert peak.details["before"] == 2 * one / 2**20
    # x, w, the activation kept for the backward, two gradients in flight, and the sum's scalars
    assert 5 * one <= peak.estimate * 2**20 <= 5 * one + 64


def test_views_and_results_in_place_do_not_count():
    x = torch.zeros(256, 256)
    with peak_memory() as peak:
        y = torch.zeros(8, 8)
        y.view(4, 16)[0].add_(1)
        x.t().add_(1)
    assert peak.live == 8 * 8 * 4


def test_storages_that_grow_or_shrink_count_as_they_are():
    counter = LiveBytes()
    with counter:
        empty = torch.empty(0)
        torch.add(torch.ones(1000), 1, out=empty)
        assert counter.current == 4000 and counter.peak == 8000
        empty.resize_(5000)
        assert counter.current == counter.peak == 20_000
        del empty
        assert counter.current == 0


def test_the_resident_peak_sees_what_was_touched():
    # much beside what a process of many tests gives back meanwhile
    row = memory.resident_row(lambda: torch.ones(512 * 2**20, dtype=torch.uint8))
    if row.status is Status.UNSUPPORTED:
        pytest.skip(row.message)
    assert 300 <= row.estimate <= 700


def test_the_resident_peak_is_what_the_kernel_says_above_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path)

    def status(rss, most):
        (tmp_path / "status").write_text(f"Name: x\nVmHWM:\t {most} kB\nVmRSS:\t {rss} kB\n")

    status(100, 100)
    row = memory.resident_row(lambda: status(100, 1124), scope="forward")
    assert (row.estimate, row.details) == (1.0, {"before": 100 / 1024})
    assert (row.n, row.samples, row.scope) == (1, (1.0,), "forward")
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert memory.resident_row(lambda: status(50, 50)).estimate == 0
    (tmp_path / "status").write_text("Name: x\n")
    assert "no VmRSS" in memory.resident_row(lambda: None).message
    monkeypatch.setattr(memory, "_PROC", tmp_path / "nowhere")
    row = measure_memory(lambda: None)[1]
    assert row.status is Status.UNSUPPORTED and "does not report" in row.message


def test_a_gpus_allocator_gives_both_peaks_in_mib_and_what_else_was_alive_is_no_part_of_the_first(
    monkeypatch,
):
    for name, mib in {
        "synchronize": 0,
        "reset_peak_memory_stats": 0,
        "memory_allocated": 1,
        "max_memory_allocated": 3,
        "max_memory_reserved": 5,
        "memory_reserved": 2,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, mib=mib: mib * 2**20)
    existing = (torch.empty(2**19, dtype=torch.uint8),)
    given = {"device": "cuda:0", "scope": "s", "predicted_bytes": 4 * 2**20}
    rows = measure_memory(lambda: None, existing=existing, **given)
    assert [(row.metric, row.estimate, row.predicted, row.scope) for row in rows] == [
        ("peak_memory", 2.5, 4.0, "s"),
        ("reserved_memory", 3.5, None, "s"),
    ]
    for row in rows:
        assert (row.details, row.method) == ({"before": 1.0}, "cuda_allocator")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7 * 2**20, 9 * 2**20))
    assert free_bytes("cuda:0") == (7 + 2 - 1) * 2**20  # reserved memory is free for tensors


BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class _OnCuda(torch.Tensor):
    """Shape and strides of a tensor on a GPU, without one."""

    @property
    def device(self):
        return torch.device("cuda")


def _tensor(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta").as_subclass(_OnCuda)


@pytest.mark.parametrize(
    ("shape", "counted_mib"),  # torch 2.11's allocator, beside q, k, v and the output's gradient
    [
        ((32, 32, 16_384, 128), 1028.0),
        ((32, 32, 16_384, 64), 516.0),
        ((32, 8, 16_384, 128), 1092.0),
    ],
)
def test_the_peak_of_a_backward_pass_is_what_the_allocator_counted(shape, counted_mib):
    heads, kv_heads, length, head_dim = shape
    q, k = (_tensor(1, count, length, head_dim) for count in (heads, kv_heads))
    gradients, log_sum_exp = 2 * k.nbytes + q.nbytes, 4 * heads * length
    found = q.nbytes + log_sum_exp + gradients + workspace_bytes(BACKWARD, (q, q, k, k, q))
    assert found / 2**20 == pytest.approx(counted_mib, rel=1e-4)


def test_positions_before_heads_need_no_copies_and_other_devices_nothing():
    first, last = _tensor(1, 8, 1024, 64), _tensor(1, 1024, 8, 64).transpose(1, 2)
    heads_first, heads_last = (workspace_bytes(BACKWARD, (x,) * 5) for x in (first, last))
    assert heads_first - heads_last == 2 * first.nbytes
    assert workspace_bytes(BACKWARD, (torch.empty(1, 2, 16, 8),) * 5) == 0
