"""Explore one attention case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanolib.experiments.attention import cases, view
from nanolib.experiments.panel import LENGTHS, Panel, Shown
from nanolib.models.attention.patterns import PATTERNS
from nanolib.run import sweep

if TYPE_CHECKING:
    import pandas as pd


_WITH_WINDOW = set(PATTERNS) - {"random"}  # the others take it as reach, stride or chunk


def attention_panel(params: cases.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one attention case; the notebook's parameters give the rest. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    kinds = ["dense", "dense (math)", "dense (flash)", *PATTERNS]
    controls = {
        "kind": widgets.Dropdown(options=kinds, value="window", description="attention"),
        "seq_len": widgets.SelectionSlider(options=LENGTHS, value=1024, description="tokens"),
        "window": widgets.SelectionSlider(options=LENGTHS, value=256, description="window"),
        "heads": widgets.BoundedIntText(value=params.num_heads, min=1, max=256, description="heads"),
        "causal": widgets.Checkbox(value=params.causal, description="causal"),
    }

    def build(values: Mapping[str, Any]) -> cases.Params:
        kind: dict[str, Any] = {"kind": "dense"}
        if values["kind"] in PATTERNS:
            kind = {"kind": "sparse", "pattern": values["kind"], "window": values["window"]}
        elif "(" in values["kind"]:
            kind["backend"] = values["kind"].split("(")[1].rstrip(")")
        return params.replace(
            seq_lens=[values["seq_len"]],
            batch_sizes=params.batch_sizes[:1],
            dtypes=params.dtypes[:1],
            attention_types=[kind],
            num_heads=values["heads"],
            num_kv_heads=0,
            causal=values["causal"],
            quality_patterns=[],
        )

    def idle(values: Mapping[str, Any]) -> tuple[str, ...]:
        return () if values["kind"] in _WITH_WINDOW else ("window",)

    shown = Shown(view.attention_latency, view.attention_table, view.ATTENTION_COLUMNS, ("forward",))
    return Panel(cases, controls, build, shown, rows, idle).widget
