"""Joules: `power` finds the sensors, `integration` turns their readings into bounds, `meter` measures windows."""

from nanolib.meters.energy.integration import integrate
from nanolib.meters.energy.meter import EnergyMeter

__all__ = ["EnergyMeter", "integrate"]
