"""Explore one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanolib.config import PRESETS
from nanolib.experiments.model import cases, view
from nanolib.experiments.panel import LENGTHS, Panel, Shown
from nanolib.run import sweep

if TYPE_CHECKING:
    import pandas as pd


def model_panel(params: cases.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one model; the notebook's parameters give the rest. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "preset": widgets.Dropdown(options=list(PRESETS), value=params.presets[0], description="preset"),
        "layers": widgets.BoundedIntText(value=2, min=1, max=200, description="layers"),
        "seq_len": widgets.SelectionSlider(options=LENGTHS, value=128, description="tokens"),
        "batch": widgets.BoundedIntText(value=1, min=1, max=512, description="batch"),
        "train": widgets.Checkbox(value=False, description="training too"),
    }

    def build(values: Mapping[str, Any]) -> cases.Params:
        return params.replace(
            presets=[values["preset"]],
            overrides={"num_layers": values["layers"]},
            seq_lens=[values["seq_len"]],
            batch_sizes=[values["batch"]],
            dtypes=params.dtypes[:1],
            attention_types=params.attention_types[:1],
            train=values["train"],
            loss_steps=0,
            generation_batch_sizes=[],
            peak_remedies=[],
        )

    shown = Shown(
        view.model_performance, view.model_table, view.MODEL_COLUMNS, ("inference", "training_step", "decode")
    )
    return Panel(cases, controls, build, shown, rows).widget
