"""Provide nanolib's measurements under the function names of other benchmark suites.

For intervals, flags and all samples, use `nanolib.measure`, which returns a `Measurement`.
"""

import contextlib
import statistics
from collections.abc import Callable
from typing import Self

import torch

from nanolib.config import PRESETS
from nanolib.measurement import BadInput, Measurement
from nanolib.meters.call_check import CallCheck
from nanolib.meters.clock import Device, clock_for
from nanolib.meters.latency import summarize
from nanolib.meters.layers import LayerProfiler, create_profiler
from nanolib.meters.memory import Peak, peak_memory, resident_peak
from nanolib.meters.ranks import Timer
from nanolib.meters.recording import ProfilingConfig
from nanolib.models.attention.ranks import Ranks, Sharding
from nanolib.models.attention.tree import tree_attention_decode
from nanolib.models.user import logits_of

__all__ = [
    "MODEL_CONFIGS",
    "LayerProfiler",
    "MemoryProfiler",
    "ProfilingConfig",
    "Timer",
    "benchmark_forward",
    "benchmark_forward_backward",
    "benchmark_with_statistics",
    "create_profiler",
    "profiled_tree_attn_decode",
]

MODEL_CONFIGS = {
    name: {key: PRESETS[name][key] for key in ("d_model", "d_ff", "num_layers", "num_heads")}
    for name in ("small", "medium", "large", "xl", "2.7B")
}

_GIB = 2**30


def _series(step: Callable[[], object], device: Device, warmup: int, trials: int) -> list[float]:
    """Return the times of `trials` single calls after `warmup` calls, ms."""
    if trials < 1 or warmup < 0:
        raise BadInput(
            f"trials, measure_steps: {trials} timed calls after {warmup} warm-up calls are not "
            "possible; time at least one call, and give no negative number"
        )
    clock = clock_for(device)
    calls = [CallCheck(step, "func", BadInput), *[step] * (warmup + trials - 1)]
    for call in calls[:warmup]:
        call()
    return [clock.time_block([call], 1, 1)[0][0] for call in calls[warmup:]]


def _mean_and_sd_s(
    step: Callable[[], object], device: torch.device, warmup_steps: int, measure_steps: int
) -> tuple[float, float]:
    samples = _series(step, device, warmup_steps, measure_steps)
    sd = statistics.stdev(samples) if len(samples) > 1 else 0.0
    return statistics.fmean(samples) / 1e3, sd / 1e3


def benchmark_with_statistics(
    func: Callable[[], object], trials: int = 20, warmup: int = 5, *, remove_outliers: bool = False
) -> Measurement:
    """Measure the latency of a function in single calls.

    Args:
        func: Function to call without arguments.
        trials: Number of timed calls.
        warmup: Number of calls before the timed calls.
        remove_outliers: Whether to remove samples beyond Tukey's inner fences. If true, `method`
            reports the removal. By default, nanolib flags outliers and keeps all samples.

    Returns:
        Latency, ms. The details contain the mean, the standard deviation and percentiles.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return summarize(_series(func, device, warmup, trials), remove_outliers=remove_outliers)


def benchmark_forward(
    model: torch.nn.Module, ids: torch.Tensor, warmup_steps: int = 5, measure_steps: int = 10
) -> tuple[float, float]:
    """Return the mean time and standard deviation of forward passes without gradients, s.

    Args:
        model: Model that takes `ids`.
        ids: Token ids, int64, shape [batch, length].
        warmup_steps: Number of calls before the timed calls.
        measure_steps: Number of timed calls.

    Returns:
        Mean and standard deviation (ddof = 1), s.
    """

    def forward():
        with torch.no_grad():
            model(ids)

    return _mean_and_sd_s(forward, ids.device, warmup_steps, measure_steps)


def benchmark_forward_backward(
    model: torch.nn.Module, ids: torch.Tensor, warmup_steps: int = 5, measure_steps: int = 10
) -> tuple[float, float]:
    """Return the mean time and standard deviation of forward and backward passes, s.

    The function deletes the gradients of the model.

    Args:
        model: Model that takes `ids`.
        ids: Token ids, int64, shape [batch, length].
        warmup_steps: Number of calls before the timed calls.
        measure_steps: Number of timed calls.

    Returns:
        Mean and standard deviation (ddof = 1), s.
    """
    logits = logits_of(model)

    def forward_backward():
        logits(ids).float().mean().backward()
        model.zero_grad()

    return _mean_and_sd_s(forward_backward, ids.device, warmup_steps, measure_steps)


def profiled_tree_attn_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, timer: Timer
) -> torch.Tensor:
    """Decode with tree attention in three all-reduces, and time each part.

    The parts are `comp_shard_kv`, `comp_local_attention`, `comm_max_lse`, `comp_num_den`,
    `comm_sum_den`, `comm_sum_num`, `comp_final_output`, and `wait` before each communication.

    Args:
        q: Queries of the newest token, equal on all ranks, shape [batch, heads, 1, head_dim].
        k: Keys of the whole sequence, equal on all ranks, shape
            [batch, kv_heads, kv_len, head_dim].
        v: Values of the whole sequence, with the shape of `k`.
        timer: Timer that records each part. `timer.print_stats()` prints the times.

    Returns:
        Output of the attention, with the shape and dtype of `q`.
    """
    with timer.time_block("comp_shard_kv"):
        ranks = Ranks()
        layout = Sharding.contiguous(k.shape[2], ranks.world)
        k, v = layout.take(k, ranks.rank), layout.take(v, ranks.rank)
    return tree_attention_decode(q, k, v, layout=layout, algorithm="three_allreduce", timer=timer)


class MemoryProfiler(contextlib.ExitStack):
    """Record the peak memory within a `with` statement. Read the memory after the statement.

    The count has the results of torch's operations. It misses tensors that other code allocates, as
    in `copy.deepcopy` and `torch.load`. Do not nest profilers, because each profiler resets the
    counters of the system.

    Args:
        device: `cpu` or a CUDA device. By default, the device is the GPU if there is one.
    """

    def __init__(self, device: Device | None = None):
        super().__init__()
        self._device = str(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._peak, self._resident = Peak(), Peak()

    def __enter__(self) -> Self:
        self._resident = self.enter_context(resident_peak())
        self._peak = self.enter_context(peak_memory(self._device))
        return self

    def _live(self) -> int:
        if self._peak.live is None:
            raise BadInput(
                "MemoryProfiler: no peak is recorded yet; read it after the `with` statement"
            )
        return self._peak.live

    def _resident_bytes(self) -> int:
        if self._resident.resident is None:
            raise BadInput(
                f"MemoryProfiler: {self._resident.resident_message}; use a Linux system with the "
                "counter VmHWM"
            )
        return self._resident.resident

    def peak_memory_gpu(self) -> float:
        """Return the peak memory allocated on the GPU, GiB. On a CPU, the result is 0."""
        return self._live() / _GIB if self._device.startswith("cuda") else 0.0

    def peak_memory_cpu(self) -> float:
        """Return the peak memory of live tensors on the CPU, GiB.

        If the device is a GPU, return the increase of the resident set instead.

        Raises:
            BadInput: This system does not report the peak of the resident set.
        """
        live = self._live()
        return (self._resident_bytes() if self._device.startswith("cuda") else live) / _GIB

    def efficiency_score(self) -> float:
        """Return peak live memory divided by peak reserved memory, in [0, 1].

        On a GPU, CUDA's allocator reports the reserved memory. On a CPU, the reserved memory is the
        increase of the resident set.

        Raises:
            BadInput: This system does not report the peak of the resident set.
        """
        live, reserved = self._live(), self._peak.reserved
        if reserved is None:
            reserved = self._resident_bytes()
        return min(1.0, live / reserved) if reserved else 1.0
