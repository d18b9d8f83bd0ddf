"""Profile the layers, operations and activations of a model, and measure profiling overhead."""

from nanolib.meters.layers.profiler import LayerProfiler, create_profiler
from nanolib.meters.layers.recording import ProfilingConfig

__all__ = ["LayerProfiler", "ProfilingConfig", "create_profiler"]
