import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanolib import NanoConfig, compat, create_model, generate_random_batch
from nanolib.compat import (
    MODEL_CONFIGS,
    MemoryProfiler,
    benchmark_forward,
    benchmark_forward_backward,
    benchmark_with_statistics,
)
from nanolib.measurement import BadInput
from nanolib.meters.time.ranks import Timer


@pytest.fixture
def model():
    return create_model(
        NanoConfig(vocab_size=64, context_length=32, d_model=32, num_layers=1, num_heads=2)
    )


def test_forward_runs_warm_up_and_timed_steps(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    ids = generate_random_batch(1, 8, 64)
    mean, sd = benchmark_forward(model, ids, warmup_steps=2, measure_steps=3)
    assert calls == [False] * 5 and mean > 0 and sd >= 0
    mean, sd = benchmark_forward_backward(model, ids, warmup_steps=1, measure_steps=2)
    assert calls[5:] == [True] * 3 and mean > 0 and all(p.grad is None for p in model.parameters())


def test_blocks_within_blocks_are_counted_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr("nanolib.meters.time.ranks.time.perf_counter", lambda: float(next(now)))
    timer = Timer(use_cuda=False)
    with (
        timer.time_block("my_attention"),
        timer.time_block("comp_inner"),
        timer.time_block("comm_deep"),
    ):
        pass
    assert timer.seconds == {"comm_deep": [1.0], "comp_inner": [2.0], "my_attention": [2.0]}
    assert sum(timer.totals().values()) == 5  # what passed from the first to the last
    with pytest.raises(BadInput, match=r"Timer: device .cuda. is not available; give use_cuda="):
        Timer(use_cuda=True)


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
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launch, "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"PYTHONPATH": str(Path.cwd())}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    for rank in range(2):
        assert f"rank {rank} of 2" in ended.stdout
    parts = ["comp_shard_kv", "comp_local_attention", "comm_max_lse"]
    for part in [*parts, "compute", "communication", "total"]:
        assert ended.stdout.count(f"\n{part} ") == 2, part


def test_the_memory_profiler_counts_live_bytes():
    with MemoryProfiler(torch.device("cpu")) as profiler:
        with pytest.raises(BadInput, match="no memory is recorded yet"):
            profiler.peak_memory_cpu()
        x = torch.ones(2**26, dtype=torch.uint8)
    assert profiler.peak_memory_cpu() == 2**26 / 2**30 and profiler.peak_memory_gpu() == 0
    assert 0 < profiler.efficiency_score() <= 1
    del x


def test_counts_are_named_as_they_are_called():
    with pytest.raises(BadInput, match=r"^trials: 0 is not valid"):
        benchmark_with_statistics(lambda: None, trials=0)
    with pytest.raises(BadInput, match=r"^warmup: -1 is not valid"):
        benchmark_with_statistics(lambda: None, warmup=-1)
    for warmup in (0, 1):
        with pytest.raises(BadInput, match=r"^func: a call only starts the work"):
            benchmark_with_statistics(lambda: (x for x in "ab"), warmup=warmup)


def test_the_profilers_names_are_there_with_the_arguments_that_others_use():
    config = compat.ProfilingConfig.custom(
        capture_activations=True,
        deep_profiling=True,
        power_sample_interval_ms=100,
        batch_db_commits=True,
        preallocate_metrics=8,
    )
    assert (
        compat.ProfilingConfig.deep().deep_profiling
        and not compat.ProfilingConfig.minimal().modules
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for profiler in (
        compat.create_profiler(model, config),
        compat.LayerProfiler(
            model, capture_activations=True, preallocate_size=4, every_kth_token=1
        ),
    ):
        with profiler:
            model(torch.ones(2, 4))
        whole, linear, _ = profiler.results()
        assert not whole.values and len(linear.values) == 4


def test_a_model_is_made_of_a_size_or_of_another_config():
    model = compat.create_model(
        MODEL_CONFIGS["small"], context_length=64, device="cpu", num_layers=1, vocab_size=100
    )
    ids = generate_random_batch(2, 64, 100, "cpu")
    assert model(ids).shape == (2, 64, 100) and model.config.context_length == 64
    again = compat.create_model(model.config, context_length=32)
    assert again.config == NanoConfig(**model.config.model_dump() | {"context_length": 32})
    with pytest.raises(BadInput, match="nonsense"):
        compat.create_model(MODEL_CONFIGS["small"], nonsense=1)


def test_statistics_warm_up_first_and_drop_outliers_where_that_is_asked_for(monkeypatch):
    calls = []
    row = benchmark_with_statistics(lambda: calls.append(1))
    assert len(calls) == 5 + 20 and len(row.samples) == 20
    series = [1.0, 1.1, 0.9, 1.0, 1.05] * 4
    monkeypatch.setattr(compat, "_series", lambda *_, **__: [*series[:-1], 50.0])
    kept, removed = (
        benchmark_with_statistics(lambda: None, remove_outliers=remove) for remove in (False, True)
    )
    assert (
        kept.details["mean"] > 3
        and "outliers removed" in removed.method
        and len(removed.samples) == 20
    )
