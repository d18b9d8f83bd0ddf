"""Measure energy: `power` finds sensors, `meter` reads them, and `integration` computes joules."""

from nanolib.meters.energy.integration import integrate
from nanolib.meters.energy.meter import EnergyMeter

__all__ = ["EnergyMeter", "integrate"]
