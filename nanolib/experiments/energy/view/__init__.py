"""What a person sees of energy: joules per token, power over time, and what the layers and operations take."""

from nanolib.experiments.energy.view.energy import (
    ENERGY_COLUMNS,
    energy_per_token,
    energy_table,
    power_over_time,
    verdict,
)
from nanolib.experiments.energy.view.layers import (
    OVERHEAD_COLUMNS,
    operation_breakdown,
    overhead_percent,
)
from nanolib.report.section import CaseTable, Section

SECTION = Section(
    "energy",
    "What does a token cost in joules?",
    {
        "energy_per_token": energy_per_token,
        "operation_breakdown": operation_breakdown,
        "power_over_time": power_over_time,
    },
    {
        "Joules, power and time": CaseTable(energy_table, ENERGY_COLUMNS),
        "Profiling overhead": CaseTable(overhead_percent, OVERHEAD_COLUMNS),
    },
    verdict,
)
