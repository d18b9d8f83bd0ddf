"""What a person sees of attention: how fast, how much memory, how exact, and what the missing connections cost."""

from nanolib.experiments.attention.view import charts
from nanolib.experiments.attention.view.charts import (
    attention_efficiency,
    attention_latency,
    attention_memory,
    attention_parts,
    attention_roofline,
    attention_speed_up,
)
from nanolib.experiments.attention.view.quality import (
    QUALITY_COLUMNS,
    attention_quality,
    quality_table,
)
from nanolib.experiments.attention.view.tables import ATTENTION_COLUMNS, attention_table
from nanolib.experiments.attention.view.words import verdict
from nanolib.report.section import CaseTable, Section

SECTION = Section(
    "attention",
    "When is sparse attention faster?",
    charts.CHARTS,
    {
        "Time, memory and error": CaseTable(attention_table, ATTENTION_COLUMNS),
        "Loss in a trained model": CaseTable(quality_table, QUALITY_COLUMNS),
    },
    verdict,
    files=charts.FILES,
)
