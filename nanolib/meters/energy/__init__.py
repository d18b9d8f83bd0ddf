"""Measure energy: `power` finds sensors, `integration` computes joules, `meter` opens windows."""

from nanolib.meters.energy.integration import integrate
from nanolib.meters.energy.meter import EnergyMeter

__all__ = ["EnergyMeter", "integrate"]
