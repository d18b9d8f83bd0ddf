"""What a person sees of energy: joules per token, power over time, and what the layers and operations take."""

from nanolib.experiments.energy.view import energy, layers
from nanolib.experiments.energy.view.energy import (
    ENERGY_COLUMNS,
    energy_per_token,
    energy_table,
    power_over_time,
    verdict,
)
from nanolib.experiments.energy.view.layers import (
    activation_profile,
    layer_heat_map,
    operation_breakdown,
    profiling_overhead,
    readable_overheads,
)
from nanolib.report.section import Section

SECTION = Section(
    "energy",
    "What does a token cost in joules?",
    {**energy.CHARTS, **layers.CHARTS},
    energy_table,
    ENERGY_COLUMNS,
    verdict,
)
