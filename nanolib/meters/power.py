"""A thin name for `meters.energy`, on which others build."""

from nanolib.meters.energy.integration import count, integrate
from nanolib.meters.energy.power import (
    AmdSource,
    AppleSource,
    EstimateSource,
    Found,
    NoSensor,
    NvmlSource,
    RaplSource,
    Reading,
    Source,
    find_sources,
)
from nanolib.meters.energy.replay import ReplaySource

__all__ = [
    "AmdSource",
    "AppleSource",
    "EstimateSource",
    "Found",
    "NoSensor",
    "NvmlSource",
    "RaplSource",
    "Reading",
    "ReplaySource",
    "Source",
    "count",
    "find_sources",
    "integrate",
]
