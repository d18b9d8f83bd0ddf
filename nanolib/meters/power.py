"""A thin name for `meters.energy`, on which others build."""

from nanolib.meters.energy.integration import integrate
from nanolib.meters.energy.power import find_sources

__all__ = ["find_sources", "integrate"]
