import contextlib
import os
import sys

import pytest
import torch

from nanolib import compat
from nanolib.compat import benchmark_with_statistics
from nanolib.measurement import BadInput, Flag
from nanolib.meters.memory import Peak
from nanolib.paths import checkout
from tests.processes import ended


def test_forward_runs_warm_up_and_timed_steps():
    model, calls = torch.nn.Linear(8, 4), []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    ids = torch.ones(1, 8)
    mean, sd = compat.benchmark_forward(model, ids, warmup_steps=2, measure_steps=3)
    assert calls == [False] * 5 and mean > 0 and sd >= 0
    mean, sd = compat.benchmark_forward_backward(model, ids, warmup_steps=1, measure_steps=2)
    assert calls[5:] == [True] * 3 and mean > 0 and all(p.grad is None for p in model.parameters())


_DECODE = """
import torch, torch.distributed as dist
from nanolib.compat import Timer, profiled_tree_attn_decode
dist.init_process_group("gloo")
torch.manual_seed(0)
q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 96, 16), torch.randn(1, 2, 96, 16)
timer = Timer(use_cuda=torch.cuda.is_available())
out = profiled_tree_attn_decode(q, k, v, timer)
whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
assert torch.allclose(out, whole, atol=1e-5)
timer.print_stats()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_decode_under_torchrun_with_a_table_of_components(tmp_path):
    """As such users start it; each rank prints its own table, whole."""
    script = tmp_path / "decode.py"
    script.write_text(_DECODE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(checkout()),
    }
    done = ended(sys.executable, *launch, str(script), env=os.environ | environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(f"rank {rank} of 2" in done.stdout for rank in range(2))
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    parts = "comp_shard_kv comp_local_attention comm_max_lse comp_num_den comm_sum_den comm_sum_num"
    for part, calls in [
        *((part, 1) for part in parts.split()),
        ("comp_final_output", 1),
        ("wait", 3),
    ]:
        assert rows.count([part, str(calls)]) == 2, part


def test_the_memory_profiler_counts_live_bytes():
    with compat.MemoryProfiler(torch.device("cpu")) as profiler:
        with pytest.raises(BadInput, match="no peak is recorded yet"):
            profiler.peak_memory_cpu()
        x = torch.ones(2**26, dtype=torch.uint8)
    assert profiler.peak_memory_cpu() == 2**26 / 2**30 and profiler.peak_memory_gpu() == 0
    assert 0 < profiler.efficiency_score() <= 1
    del x


def test_a_resident_peak_that_is_not_known_is_not_zero(monkeypatch):
    """As of a process on a GPU in a sandbox whose kernel has no such counter."""
    found = Peak(live=1, resident_message="the kernel does not report the resident peak")
    for name in ("peak_memory", "resident_peak"):
        monkeypatch.setattr(compat, name, lambda *_: contextlib.nullcontext(found))
    with compat.MemoryProfiler("cuda") as profiler:
        pass
    for ask in (profiler.peak_memory_cpu, profiler.efficiency_score):
        with pytest.raises(BadInput, match="MemoryProfiler: the kernel does not report"):
            ask()


def test_the_profiler_takes_the_argument_that_others_use():
    profiler = compat.LayerProfiler(torch.nn.Linear(4, 4), preallocate_size=4)
    assert profiler.config.preallocate_metrics == 4


def test_statistics_warm_up_first_and_drop_outliers_where_that_is_asked_for(monkeypatch):
    calls = []
    row = benchmark_with_statistics(lambda: calls.append(1))
    assert len(calls) == 5 + 20 and len(row.samples) == 20
    series = [1.0, 1.1, 0.9, 1.0, 1.05] * 4
    monkeypatch.setattr(compat, "_series", lambda *_, **__: [*series[:-1], 50.0])
    kept = benchmark_with_statistics(lambda: None)
    removed = benchmark_with_statistics(lambda: None, remove_outliers=True)
    assert kept.details["mean"] > 3 and len(removed.samples) == 20
    assert "outliers removed" in removed.method
    outliers = {flag for flag in removed.flags if "outliers" in flag}
    assert outliers == {Flag.OUTLIERS_REMOVED} and Flag.OUTLIERS_SEVERE in kept.flags


@pytest.mark.parametrize(("trials", "warmup"), [(0, 5), (3, -1)])
def test_at_least_one_call_is_timed(trials, warmup):
    with pytest.raises(BadInput, match=f"{trials} timed calls after {warmup} warm-up calls"):
        benchmark_with_statistics(int, trials, warmup)


def test_a_timer_without_sections_prints_only_the_heading():
    lines = []
    compat.Timer().print_stats(lines.append)
    assert lines[0].split()[:2] == ["name", "calls"]
