"""Explore one warm-up setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanolib.experiments.panel import LENGTHS, Panel, Shown
from nanolib.experiments.warmup import cases, view
from nanolib.run import sweep

if TYPE_CHECKING:
    import pandas as pd


def warmup_panel(params: cases.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one warm-up setting beside the curve. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "warmup_steps": widgets.BoundedIntText(value=5, min=0, max=1000, description="warm-up"),
        "seq_len": widgets.SelectionSlider(options=LENGTHS[:6], value=64, description="tokens"),
        "direction": widgets.Dropdown(options=cases.DIRECTIONS, description="direction"),
    }

    def build(values: Mapping[str, Any]) -> cases.Params:
        settings = {"warmup_steps": [values["warmup_steps"]], "directions": [values["direction"]]}
        return params.replace(**settings, seq_len=values["seq_len"])

    shown = Shown(view.warmup_settings, view.warmup_table, view.WARMUP_COLUMNS, follows=("seq_len",))
    return Panel(cases, controls, build, shown, rows).widget
