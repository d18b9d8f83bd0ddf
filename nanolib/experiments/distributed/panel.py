"""Explore decoding over a sharded cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanolib.experiments.distributed import cases, view
from nanolib.experiments.panel import Panel, Shown
from nanolib.models.attention import tree
from nanolib.run import sweep

if TYPE_CHECKING:
    import pandas as pd


_LENGTHS = [2**power for power in range(10, 21)]
_DTYPES = ["float32", "bfloat16"]


def distributed_panel(params: cases.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for decoding over a sharded cache. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "ranks": widgets.BoundedIntText(value=2, min=1, max=64, description="ranks"),
        "seq_len": widgets.SelectionSlider(
            options=_LENGTHS, value=next((n for n in params.seq_lens if n in _LENGTHS), 8192), description="tokens"
        ),
        "form": widgets.Dropdown(options=list(tree.ALGORITHMS), value="fused", description="algorithm"),
        "dtype": widgets.Dropdown(
            options=_DTYPES, value=next((one for one in params.dtypes if one in _DTYPES), "float32"), description="type"
        ),
    }

    def build(values: Mapping[str, Any]) -> cases.Params:
        nothing_else = {"prefill_seq_lens": [], "memory_seq_lens": [], "training_preset": "", "overrides": {}}
        shape = {"world_sizes": [values["ranks"]], "seq_lens": [values["seq_len"]], "dtypes": [values["dtype"]]}
        return params.replace(**nothing_else, **shape, algorithms=[values["form"]])

    shown = Shown(view.decode_scaling, view.decode_table, view.DECODE_COLUMNS, follows=("seq_len", "dtype"))
    return Panel(cases, controls, build, shown, rows).widget
