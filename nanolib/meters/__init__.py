"""Measure latency, memory, FLOPs, energy and the machine. Meters know nothing of the models."""

from nanolib.meters.time.latency import measure, measure_phases

__all__ = ["measure", "measure_phases"]
