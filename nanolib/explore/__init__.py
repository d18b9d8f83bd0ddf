"""Panels for a live notebook.

`panels` makes controls, `panel` predicts and measures, `live` follows a model while it generates, `summary` lets a person pick
what all charts show.
"""

from nanolib.explore.live import live_panel
from nanolib.explore.panels import (
    attention_panel,
    distributed_panel,
    energy_panel,
    fp8_panel,
    model_panel,
    warmup_panel,
)
from nanolib.explore.summary import summary_panel

__all__ = [
    "attention_panel",
    "distributed_panel",
    "energy_panel",
    "fp8_panel",
    "live_panel",
    "model_panel",
    "summary_panel",
    "warmup_panel",
]
