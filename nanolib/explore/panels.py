"""One panel per notebook: its controls, and the parameters that they make; a batch run shows none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanolib.config import PRESETS
from nanolib.experiments.attention import cases as attention
from nanolib.experiments.distributed import cases as distributed
from nanolib.experiments.energy import cases as energy
from nanolib.experiments.fp8 import cases as fp8
from nanolib.experiments.fp8.parity import ARMS
from nanolib.experiments.model import cases as model
from nanolib.experiments.warmup import cases as warmup
from nanolib.explore.panel import Panel, Shown
from nanolib.models.attention import tree
from nanolib.models.attention.patterns import PATTERNS
from nanolib.report import distributed as tables_of_distributed
from nanolib.report import energy as tables_of_energy
from nanolib.report import fp8_parity, tables
from nanolib.run import sweep

if TYPE_CHECKING:
    import pandas as pd

_LENGTHS = [2**power for power in range(5, 14)]


def attention_panel(params: attention.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one attention case; the notebook's parameters give the rest. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    kinds = ["dense", "dense (math)", "dense (flash)", *PATTERNS]
    controls = {
        "kind": widgets.Dropdown(options=kinds, value="window", description="attention"),
        "seq_len": widgets.SelectionSlider(options=_LENGTHS, value=1024, description="tokens"),
        "window": widgets.SelectionSlider(options=_LENGTHS, value=256, description="window"),
        "heads": widgets.BoundedIntText(value=params.num_heads, min=1, max=256, description="heads"),
        "causal": widgets.Checkbox(value=params.causal, description="causal"),
    }

    def build(values: Mapping[str, Any]) -> attention.Params:
        kind: dict[str, Any] = {"kind": "dense"}
        if values["kind"] in PATTERNS:
            kind = {"kind": "sparse", "pattern": values["kind"], "window": values["window"]}
        elif "(" in values["kind"]:
            kind["backend"] = values["kind"].split("(")[1].rstrip(")")
        return params.replace(
            seq_lens=[values["seq_len"]],
            batch_sizes=params.batch_sizes[:1],
            dtypes=params.dtypes[:1],
            kinds=[kind],
            num_heads=values["heads"],
            num_kv_heads=0,
            causal=values["causal"],
            quality_patterns=[],
        )

    shown = Shown("attention_latency", tables.attention_table, tables.ATTENTION_COLUMNS)
    return Panel(attention, controls, build, shown, rows).widget


def model_panel(params: model.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one model; the notebook's parameters give the rest. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "preset": widgets.Dropdown(options=list(PRESETS), value=params.presets[0], description="preset"),
        "layers": widgets.BoundedIntText(value=2, min=1, max=200, description="layers"),
        "seq_len": widgets.SelectionSlider(options=_LENGTHS, value=128, description="tokens"),
        "batch": widgets.BoundedIntText(value=1, min=1, max=512, description="batch"),
        "train": widgets.Checkbox(value=False, description="training too"),
    }

    def build(values: Mapping[str, Any]) -> model.Params:
        return params.replace(
            presets=[values["preset"]],
            overrides={"num_layers": values["layers"]},
            seq_lens=[values["seq_len"]],
            batch_sizes=[values["batch"]],
            dtypes=params.dtypes[:1],
            attention_types=params.attention_types[:1],
            train=values["train"],
            loss_steps=0,
        )

    shown = Shown("model_performance", tables.model_table, tables.MODEL_COLUMNS)
    return Panel(model, controls, build, shown, rows).widget


def warmup_panel(params: warmup.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one warm-up setting beside the curve. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "warmup_steps": widgets.BoundedIntText(value=5, min=0, max=1000, description="warm-up"),
        "seq_len": widgets.SelectionSlider(options=_LENGTHS[:6], value=64, description="tokens"),
        "direction": widgets.Dropdown(options=warmup.DIRECTIONS, description="direction"),
    }

    def build(values: Mapping[str, Any]) -> warmup.Params:
        settings = {"warmup_steps": [values["warmup_steps"]], "directions": [values["direction"]]}
        return params.replace(**settings, seq_len=values["seq_len"])

    shown = Shown("warmup_settings", tables.warmup_table, tables.WARMUP_COLUMNS)
    return Panel(warmup, controls, build, shown, rows).widget


def energy_panel(params: energy.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one model's phases. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "preset": widgets.Dropdown(options=list(PRESETS), value=params.presets[0], description="preset"),
        "layers": widgets.BoundedIntText(value=2, min=1, max=200, description="layers"),
        "seq_len": widgets.SelectionSlider(options=_LENGTHS[:5], value=64, description="tokens"),
        "batch": widgets.BoundedIntText(value=1, min=1, max=512, description="batch"),
    }

    def build(values: Mapping[str, Any]) -> energy.Params:
        shape = {"seq_lens": [values["seq_len"]], "batch_size": values["batch"]}
        shape |= {"profiling": []}
        return params.replace(presets=[values["preset"]], overrides={"num_layers": values["layers"]}, **shape)

    return Panel(
        energy,
        controls,
        build,
        Shown("energy_per_token", tables_of_energy.energy_table, tables_of_energy.ENERGY_COLUMNS),
        rows,
    ).widget


def fp8_panel(params: fp8.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for one arm of the loss parity. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "arm": widgets.Dropdown(options=list(ARMS), value="tensorwise", description="arm"),
        "seeds": widgets.BoundedIntText(value=3, min=2, max=100, description="pairs"),
        "steps": widgets.BoundedIntText(value=50, min=10, max=100_000, description="steps"),
    }

    def build(values: Mapping[str, Any]) -> fp8.Params:
        shape = {"presets": [], "shapes": [], "numerics": [], "quoted": False}
        return params.replace(
            **shape, parity_arms=[values["arm"]], parity_seeds=values["seeds"], parity_steps=values["steps"]
        )

    shown = Shown("fp8_parity", fp8_parity.parity_table, fp8_parity.PARITY_COLUMNS)
    return Panel(fp8, controls, build, shown, rows).widget


def distributed_panel(params: distributed.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for decoding over a sharded cache. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    import ipywidgets as widgets

    controls = {
        "ranks": widgets.BoundedIntText(value=2, min=1, max=64, description="ranks"),
        "seq_len": widgets.SelectionSlider(
            options=[2**power for power in range(10, 21)], value=8192, description="tokens"
        ),
        "form": widgets.Dropdown(options=list(tree.FORMS), value="fused", description="form"),
        "dtype": widgets.Dropdown(options=["float32", "bfloat16"], description="type"),
    }

    def build(values: Mapping[str, Any]) -> distributed.Params:
        nothing_else = {"prefill_seq_lens": [], "memory_seq_lens": [], "training_preset": ""}
        shape = {"world_sizes": [values["ranks"]], "seq_lens": [values["seq_len"]], "dtypes": [values["dtype"]]}
        return params.replace(**nothing_else, **shape, forms=[values["form"]])

    return Panel(
        distributed,
        controls,
        build,
        Shown("decode_scaling", tables_of_distributed.decode_table, tables_of_distributed.DECODE_COLUMNS),
        rows,
    ).widget
