"""Measure latency, memory, FLOPs and energy, and describe the machine, without any model code."""

from nanolib.meters.time.latency import measure, measure_phases
from nanolib.meters.time.sampler import Timing

__all__ = ["Timing", "measure", "measure_phases"]
