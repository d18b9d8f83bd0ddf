"""Measure latency, memory, FLOPs, energy and the machine. Meters do not import models."""

from nanolib.meters.time.latency import measure, measure_phases
from nanolib.meters.time.sampler import Timing

__all__ = ["Timing", "measure", "measure_phases"]
