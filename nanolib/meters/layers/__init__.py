"""Inside a model: the time of layers and operations, what activations are, and what looking costs."""

from nanolib.meters.layers.profiler import LayerProfiler, create_profiler
from nanolib.meters.layers.profiling import ProfilingConfig

__all__ = ["LayerProfiler", "ProfilingConfig", "create_profiler"]
