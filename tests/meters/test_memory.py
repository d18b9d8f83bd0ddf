"""Memory: what lives, what is resident, and what FlashAttention's backward pass takes beside its tensors."""

import pytest
import torch

from nanolib.measurement import Status
from nanolib.meters import memory
from nanolib.meters.memory import measure_memory, peak_memory
from nanolib.meters.tensor_bytes import LiveBytes, workspace_bytes

KIB = 1024


def test_live_bytes_follow_birth_and_death():
    with LiveBytes() as counter:
        a = torch.empty(KIB, dtype=torch.uint8)
        b = torch.empty(2 * KIB, dtype=torch.uint8)
        del a
        c = torch.empty(KIB // 2, dtype=torch.uint8)
    assert counter.peak == 3 * KIB and counter.current == 2.5 * KIB
    del b, c
    assert counter.current == 0


def test_the_peak_of_a_product_and_its_gradient_is_pinned():
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64)
    one = 64 * 64 * 4

    def step():
        ((x @ w).relu() @ w).sum().backward()
        x.grad = None

    rows = {row.metric: row for row in measure_memory(step, existing=(x, w))}
    again = {row.metric: row for row in measure_memory(step, existing=(x, w))}
    assert rows["peak_memory"].estimate == again["peak_memory"].estimate
    assert rows["peak_memory"].details["before"] == 2 * one / 2**20
    # x, w, the activation kept for the backward, two gradients in flight; the sum's scalars beside them
    assert 5 * one <= rows["peak_memory"].estimate * 2**20 <= 5 * one + 64


def test_the_resident_peak_sees_what_was_touched():
    def touch():  # much beside what a process of many tests gives back meanwhile
        torch.ones(512 * 2**20, dtype=torch.uint8)

    row = next(row for row in measure_memory(touch) if row.metric == "resident_memory")
    if row.status is Status.UNSUPPORTED:
        pytest.skip(row.message)
    assert 300 <= row.estimate <= 700


def test_a_system_without_clear_refs_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "nowhere")
    row = measure_memory(lambda: None)[1]
    assert row.status is Status.UNSUPPORTED and "does not report" in row.message


def test_views_and_results_in_place_do_not_count():
    x = torch.zeros(256, 256)
    with peak_memory() as peak:
        y = torch.zeros(8, 8)
        y.view(4, 16)[0].add_(1)
        x.t().add_(1)
    assert peak.live == 8 * 8 * 4


def test_the_resident_peak_is_what_the_kernel_says_above_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path)

    def status(rss, most):
        (tmp_path / "status").write_text(f"Name: x\nVmHWM:\t {most} kB\nVmRSS:\t {rss} kB\n")

    status(100, 100)
    with memory.resident_peak() as peak:
        status(100, 340)
    assert (peak.before, peak.resident) == (100 * 1024, 240 * 1024)
    assert (tmp_path / "clear_refs").read_text() == "5"
    with memory.resident_peak() as peak:
        status(50, 50)
    assert peak.resident == 0

    def touch():
        status(100, 340 + 1024)

    status(100, 340)
    row = measure_memory(touch, scope="forward")[1]
    assert row.estimate == pytest.approx((264 + 1000) / 1024)
    assert row.details == pytest.approx({"before": 100 / 1024})
    assert (row.n, row.samples, row.scope) == (1, (row.estimate,), "forward")
    (tmp_path / "status").write_text("Name: x\n")
    assert "no VmRSS" in measure_memory(lambda: None)[1].message


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
    asked = {"device": "cuda:0", "existing": (torch.empty(2**19, dtype=torch.uint8),), "scope": "s"}
    rows = measure_memory(lambda: None, predicted_bytes=4 * 2**20, **asked)
    assert [(row.metric, row.estimate, row.predicted, row.scope) for row in rows] == [
        ("peak_memory", 2.5, 4.0, "s"),
        ("reserved_memory", 3.5, None, "s"),
    ]
    assert all(row.details == {"before": 1.0} for row in rows)
    assert {row.method for row in rows} == {"cuda_allocator"}


BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default


class _OnCuda(torch.Tensor):
    """Shape and strides of a tensor on a GPU, without one."""

    @property
    def device(self):
        return torch.device("cuda")


def _tensor(heads, length, head_dim, *, heads_first=True):
    shape = (1, heads, length, head_dim) if heads_first else (1, length, heads, head_dim)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta").as_subclass(_OnCuda)
    return x if heads_first else x.transpose(1, 2)


def _peak(heads, kv_heads, length, head_dim, **more):
    """Output, its log-sum-exp, three gradients and the workspace."""
    q, k = (_tensor(each, length, head_dim, **more) for each in (heads, kv_heads))
    lse = 4 * heads * length
    return 2 * q.nbytes + 2 * k.nbytes + lse + workspace_bytes(BACKWARD, (q, q, k, k, q))


@pytest.mark.parametrize(
    ("shape", "counted_mib"),  # torch 2.11's allocator, beside q, k, v and the output's gradient
    [
        ((32, 32, 16_384, 128), 1028.0),
        ((32, 32, 16_384, 64), 516.0),
        ((32, 8, 16_384, 128), 1092.0),
    ],
)
def test_the_peak_of_a_backward_pass_is_what_the_allocator_counted(shape, counted_mib):
    assert _peak(*shape) / 2**20 == pytest.approx(counted_mib, rel=1e-4)


def test_positions_before_heads_need_no_copies():
    heads_first, heads_last = (_peak(8, 8, 1024, 64, heads_first=first) for first in (True, False))
    assert heads_first - heads_last == 2 * _tensor(8, 1024, 64).nbytes


def test_other_operations_and_other_devices_need_none():
    q = torch.empty(1, 2, 16, 8)
    assert workspace_bytes(BACKWARD, (q, q, q, q, q)) == 0
    assert workspace_bytes(torch.ops.aten.mm.default, (q, q)) == 0
