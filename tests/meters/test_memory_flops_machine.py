import json

import pytest
import torch

from nanolib import NanoConfig, create_model, generate_random_batch
from nanolib.measurement import BadInput, Measurement, Status
from nanolib.meters import memory
from nanolib.meters.ceilings import measure_ceilings, rate
from nanolib.meters.clock import clock_for, synchronizer
from nanolib.meters.flops import count_flops, model_flops
from nanolib.meters.machine import resolve_device, this_machine
from nanolib.meters.memory import LiveBytes, measure_memory, peak_memory
from nanolib.models import attention

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


def test_views_and_in_place_results_count_once():
    with LiveBytes() as counter:
        x = torch.zeros(KIB, dtype=torch.uint8)
        y = x.view(2, -1)[0]
        y.add_(1)
        x.t()
    assert counter.peak == KIB


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
    def touch():
        torch.ones(64 * 2**20, dtype=torch.uint8)

    row = next(row for row in measure_memory(touch) if row.metric == "resident_memory")
    if row.status is Status.UNSUPPORTED:
        pytest.skip(row.message)
    assert 60 <= row.estimate <= 200


def test_a_system_without_clear_refs_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "nowhere")
    row = measure_memory(lambda: None)[1]
    assert row.status is Status.UNSUPPORTED and row.estimate is None and "does not tell" in row.message


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_model_flops_agree_with_torchs_count_to_the_digit(mlp, kv_heads):
    config = NanoConfig(vocab_size=100, d_model=32, num_layers=2, num_heads=4, num_kv_heads=kv_heads, mlp=mlp)
    ids = generate_random_batch(2, 16, 100)
    # torch counts causal attention in full, so the formula is given all pairs
    assert (
        count_flops(lambda: create_model(config)(ids)) == model_flops(config, 2, 16, lambda q, kv, _: q * kv)["total"]
    )


def test_attention_flops_agree_with_torchs_count_to_the_digit():
    q = torch.randn(2, 4, 32, 16)
    counted = count_flops(lambda: attention.attend("dense", q, q, q, causal=False))
    assert counted == attention.work("dense", 32, 32, causal=False).flops(2, 4, 16)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pattern", ["window", "local_global", "random", "strided", "bigbird"])
def test_sparse_attention_computes_what_its_tiles_say(pattern, causal):
    """It must skip the work it claims to skip."""
    q = torch.randn(1, 1, 320, 16)
    options = {
        "pattern": pattern,
        "window": 96 if pattern == "strided" else 32,
        "global_tokens": 8,
        "random_tokens": 32,
        "block_size": 32,
    }
    counted = count_flops(lambda: attention.attend("sparse", q, q, q, causal=causal, options=options))
    work = attention.work("sparse", 320, 320, causal=causal, options=options)
    assert counted == 4 * 16 * work.kept_tiles * 32 * 32
    assert work.kept_tiles < 0.6 * work.total_tiles


def test_the_machine_is_told_without_names_and_its_id_is_of_the_hardware():
    import os
    import platform

    machine = this_machine()
    text = json.dumps(machine.to_dict())
    assert platform.node() not in text and os.path.expanduser("~") not in text  # noqa: PTH111
    assert len(machine.machine_id) == 12 and machine.machine_id == this_machine().machine_id
    assert machine.cores >= 1 and machine.dtypes["float32"]


def test_devices_resolve_or_are_told():
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(BadInput, match="device: 'cuda:99' is not here; use auto or one of cpu"):
        resolve_device("cuda:99")


def test_a_rate_turns_the_interval_round():
    latency = Measurement("latency", 2.0, 1.0, 4.0, 0.95, 20, (2.0, 4.0))
    row = rate("tokens_per_second", 8, latency)
    assert (row.low, row.estimate, row.high, row.samples) == (2000, 4000, 8000, (4000, 2000))


def test_ceilings_are_measured_for_each_dtype_and_the_copy():
    rows = list(measure_ceilings("cpu", ["float32"], budget_s=0.05))
    assert [(row.metric, row.scope) for row in rows] == [("ceiling_flops", "float32"), ("ceiling_bytes", "copy")]
    assert all(row.estimate > 1e6 for row in rows)


def test_what_was_there_before_is_not_born_by_a_view_or_in_place():
    x = torch.zeros(256, 256)
    with peak_memory() as peak:
        x.t().add_(1)
        x[:8, :8] @ x[:8, :8]
    assert peak.live == 8 * 8 * 4


def test_the_device_named_is_the_one_that_is_asked(monkeypatch):
    asked = []
    for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: asked.append((name, str(device))) or 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: asked.append(("reserved", str(device))) or 0)
    with peak_memory("cuda:1"):
        pass
    synchronizer("cuda:1")()
    assert clock_for("cuda:1").device == torch.device("cuda", 1)
    assert len(asked) == 7 and {device for _, device in asked} == {"cuda:1"}
