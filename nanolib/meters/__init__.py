"""Measure latency, memory, FLOPs and energy, and describe the machine, without any model code."""

from nanolib.meters.latency import measure, measure_phases
from nanolib.meters.sampler import Timing

__all__ = ["Timing", "measure", "measure_phases"]
