"""Measure latency, memory, FLOPs, energy and the machine. Meters do not import models."""

from nanolib.meters.time.latency import measure, measure_phases

__all__ = ["measure", "measure_phases"]
