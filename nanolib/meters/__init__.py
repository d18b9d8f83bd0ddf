"""How things are measured: latency, memory, FLOPs, the machine. Meters know nothing of the models; each is one file."""

from nanolib.meters.time.latency import measure, measure_phases

__all__ = ["measure", "measure_phases"]
