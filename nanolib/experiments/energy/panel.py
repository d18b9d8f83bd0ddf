"""Explore the phases of one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanolib.config import PRESETS
from nanolib.experiments.energy import cases, view
from nanolib.experiments.panel import LENGTHS, Panel, Shown
from nanolib.run import sweep

if TYPE_CHECKING:
    import pandas as pd


def energy_panel(params: cases.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one model's phases. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "preset": widgets.Dropdown(options=list(PRESETS), value=params.presets[0], description="preset"),
        "layers": widgets.BoundedIntText(value=2, min=1, max=200, description="layers"),
        "seq_len": widgets.SelectionSlider(options=LENGTHS[:5], value=64, description="tokens"),
        "batch": widgets.BoundedIntText(value=1, min=1, max=512, description="batch"),
    }

    def build(values: Mapping[str, Any]) -> cases.Params:
        shape = {"seq_lens": [values["seq_len"]], "batch_size": values["batch"]}
        shape |= {"profiling": []}
        return params.replace(presets=[values["preset"]], overrides={"num_layers": values["layers"]}, **shape)

    shown = Shown(view.energy_per_token, view.energy_table, view.ENERGY_COLUMNS, follows=("batch_size",))
    return Panel(cases, controls, build, shown, rows).widget
