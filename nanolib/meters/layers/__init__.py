"""Profile a model: time of layers and operations, statistics of activations, profiling overhead."""

from nanolib.meters.layers.profiler import LayerProfiler, create_profiler
from nanolib.meters.layers.recording import ProfilingConfig

__all__ = ["LayerProfiler", "ProfilingConfig", "create_profiler"]
