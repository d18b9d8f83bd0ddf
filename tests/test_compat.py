import pytest
import torch

from nanolib import NanoConfig, compat, create_model, generate_random_batch
from nanolib.compat import (
    MODEL_CONFIGS,
    MemoryProfiler,
    Timer,
    benchmark_forward,
    benchmark_forward_backward,
    benchmark_with_statistics,
)
from nanolib.measurement import BadInput


@pytest.fixture
def model():
    return create_model(NanoConfig(vocab_size=64, context_length=32, d_model=32, num_layers=1, num_heads=2))


def test_forward_runs_warm_up_and_timed_steps(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    ids = generate_random_batch(1, 8, 64)
    mean, sd = benchmark_forward(model, ids, warmup_steps=2, measure_steps=3)
    assert calls == [False] * 5 and mean > 0 and sd >= 0
    mean, sd = benchmark_forward_backward(model, ids, warmup_steps=1, measure_steps=2)
    assert calls[5:] == [True] * 3 and mean > 0 and all(p.grad is None for p in model.parameters())


def test_statistics_are_of_as_many_trials(model):
    row = benchmark_with_statistics(lambda: None, trials=12)
    assert len(row.samples) == 12 and {"mean", "sd", "p95"} <= set(row.details)


def test_a_bad_count_is_told(model):
    with pytest.raises(BadInput, match="measure_steps: 0 will not do"):
        benchmark_forward(model, generate_random_batch(1, 8, 64), measure_steps=0)


def test_the_timer_adds_up_by_name(capsys):
    timer = Timer()
    for _ in range(3):
        with timer.time_block("a"):
            pass
    with pytest.raises(ZeroDivisionError), timer.time_block("b"):
        _ = 1 / 0
    timer.print_stats()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["a", "3"] and lines[2].split()[:2] == ["b", "1"]


def test_the_memory_profiler_counts_live_bytes():
    with MemoryProfiler("cpu") as profiler:
        with pytest.raises(BadInput, match="nothing is recorded yet"):
            profiler.peak_memory_cpu()
        x = torch.ones(2**26, dtype=torch.uint8)
    assert profiler.peak_memory_cpu() == 2**26 / 2**30 and profiler.peak_memory_gpu() == 0
    assert 0 < profiler.efficiency_score() <= 1
    del x


def test_model_configs_are_the_presets_sizes():
    assert MODEL_CONFIGS["xl"] == {"d_model": 1600, "d_ff": 6400, "num_layers": 48, "num_heads": 25}


def test_the_profilers_names_are_there_with_the_arguments_that_others_use():
    config = compat.ProfilingConfig.custom(
        capture_activations=True,
        deep_profiling=True,
        power_sample_interval_ms=100,
        batch_db_commits=True,
        preallocate_metrics=8,
    )
    assert compat.ProfilingConfig.deep().deep_profiling and not compat.ProfilingConfig.minimal().modules
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for profiler in (
        compat.create_profiler(model, config),
        compat.LayerProfiler(model, capture_activations=True, preallocate_size=4, every_kth_token=1),
    ):
        with profiler:
            model(torch.ones(2, 4))
        assert len(profiler.results()[0].statistics) == 0 and profiler.results()[1].statistics.shape == (1, 4)
