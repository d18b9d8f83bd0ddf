"""Explore one arm of the loss parity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanolib.experiments.fp8 import cases, view
from nanolib.experiments.fp8.parity import ARMS
from nanolib.experiments.panel import Panel, Shown
from nanolib.run import sweep

if TYPE_CHECKING:
    import pandas as pd


def fp8_panel(params: cases.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one arm of the loss parity. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "arm": widgets.Dropdown(options=list(ARMS), value="fp8_tensorwise", description="arm"),
        "seeds": widgets.BoundedIntText(value=params.parity_seeds, min=2, max=100, description="pairs"),
        "steps": widgets.BoundedIntText(value=params.parity_steps, min=10, max=100_000, description="steps"),
    }

    def build(values: Mapping[str, Any]) -> cases.Params:
        shape = {"presets": [], "overrides": {}, "shapes": [], "numerics": [], "quoted": False}
        return params.replace(
            **shape, parity_arms=[values["arm"]], parity_seeds=values["seeds"], parity_steps=values["steps"]
        )

    shown = Shown(view.fp8_parity, view.parity_table, view.PARITY_COLUMNS, follows=("seeds", "steps"))
    return Panel(cases, controls, build, shown, rows).widget
