import importlib
import time

import psutil
import pytest

from nanolib.experiments.attention import cases as attention
from nanolib.experiments.attention import panel as attention_panel
from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy import panel as energy_panel
from nanolib.experiments.energy.live import LivePower, live_panel
from nanolib.experiments.panel import Panel
from nanolib.experiments.summary import cases as summary
from nanolib.experiments.summary import panel as summary_panel
from nanolib.paths import checkout
from nanolib.run import sweep
from nanolib.store import Store

SMALL = {
    "presets": ["decoder_tiny"],
    "overrides": {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 300},
    "seq_lens": [32],
    "new_tokens": 8,
}


def test_a_batch_run_shows_no_panel(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert live_panel(energy.Params(**SMALL)) is None and energy_panel.energy_panel(energy.Params(**SMALL)) is None


def test_the_live_view_follows_generation_and_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    live = LivePower(energy.Params(**SMALL))
    before = live.chart.chart
    live.start.click()
    end = time.monotonic() + 60
    while len(live._points) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert "tokens/s" in live.said.value and live.chart.chart is not before and live.start.disabled
    live.stop.click()
    live._thread.join(timeout=60)
    assert live.said.value == "Stopped." and not live.start.disabled
    assert not (tmp_path / "results.sqlite").exists()


@pytest.fixture
def panel(tmp_path, monkeypatch):
    """The attention notebook's panel, as JupyterLab would show it."""
    made = []
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    monkeypatch.setattr(attention_panel.sweep, "live_front_end", lambda: True)

    class Kept(Panel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(attention_panel, "Panel", Kept)
    attention_panel.attention_panel(attention.Params(budget_s=0.05, quality_patterns=[], isolation="none"), None)
    return made[0]


def _wait(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def test_the_prediction_follows_the_controls_and_says_what_does_not_fit(panel):
    before = panel.predicted.value
    panel.controls["seq_len"].value = 512
    assert panel.predicted.value != before and "512" in panel.predicted.value and not panel.measure.disabled
    panel.controls["heads"].value = 7
    assert "7" in panel.predicted.value
    panel.params().replace()  # fits


@pytest.mark.slow
def test_a_measured_point_stands_in_the_chart_and_is_saved_when_asked_for(panel, tmp_path):
    panel.controls["seq_len"].value = 64
    before = panel.chart.chart
    panel.measure.click()
    assert panel.measure.disabled and not panel.cancel.disabled
    _wait(lambda: not panel.measure.disabled)
    assert "not saved yet" in panel.said.value and panel.chart.chart is not before
    drawn = [row for rows in panel.chart.chart.to_dict()["datasets"].values() for row in rows]
    assert {row["seq_len"] for row in drawn} == {64} and "window" in panel.measured.value
    with Store(tmp_path / "results.sqlite") as store:
        assert store.runs().empty
    panel.save.click()
    with Store(tmp_path / "results.sqlite") as store:
        assert list(store.runs().status) == ["done"] and panel.save.disabled


def test_cancel_ends_the_case_in_flight_and_nothing_is_saved(panel, tmp_path):
    panel.controls["seq_len"].value = 8192
    panel.measure.click()
    _wait(lambda: "0 of" in panel.said.value)
    panel.cancel.click()
    _wait(lambda: not panel.measure.disabled)
    assert panel.said.value == "Cancelled." and panel.save.disabled and panel.cancel.disabled
    assert not [child for child in psutil.Process().children() if "nanolib.run.worker" in child.cmdline()]


def test_the_summary_follows_what_is_picked(tmp_path, monkeypatch):
    monkeypatch.setattr(summary_panel.sweep, "live_front_end", lambda: True)
    params = attention.Params(
        seq_lens=[16, 32], attention_types=["dense"], budget_s=0.05, quality_patterns=[], backward=False
    )
    with Store(tmp_path / "results.sqlite") as store:
        sweep.measure(attention, params, store=store, progress=False).finish()
    runs, machines, rows = summary.load(summary.Params(database=str(tmp_path / "results.sqlite")))
    panel = summary_panel.SummaryPanel(rows, runs, machines)
    assert set(panel.picks) == {"Sequence length"}  # one machine, one run: nothing to pick there
    assert panel.charts["attention"].params.pick_n is None
    both = panel.texts["attention"].value
    panel.picks["Sequence length"].value = "32"
    assert panel.charts["attention"].params.pick_n == [32]
    assert ">32<" in panel.texts["attention"].value and ">16<" not in panel.texts["attention"].value
    panel.picks["Sequence length"].value = "all"
    assert panel.charts["attention"].params.pick_n is None and panel.texts["attention"].value == both


def test_an_empty_database_and_a_batch_run_have_no_summary_panel(tmp_path, monkeypatch):
    runs, machines, rows = _empty(tmp_path)
    monkeypatch.setattr(summary_panel.sweep, "live_front_end", lambda: True)
    assert summary_panel.summary_panel(rows, runs, machines) is None
    monkeypatch.setattr(summary_panel.sweep, "live_front_end", lambda: False)
    assert summary_panel.summary_panel(rows.reindex([0]), runs, machines) is None


def _empty(folder):
    with Store(folder / "empty.sqlite"):
        pass
    return summary.load(summary.Params(database=str(folder / "empty.sqlite")))


PANELS = {
    "attention": ({"kind": "dense (flash)", "seq_len": 64, "heads": 2, "causal": False}, "dense (flash)"),
    "model": ({"preset": "decoder_small", "layers": 1, "seq_len": 64, "batch": 2, "train": True}, "decoder_small"),
    "warmup": ({"warmup_steps": 3, "seq_len": 32, "direction": "forward_backward"}, "forward"),
    "energy": ({"preset": "decoder_small", "layers": 1, "seq_len": 64, "batch": 2}, "decoder_small"),
    "fp8": ({"arm": "fp8_rowwise", "seeds": 2, "steps": 10}, "parity"),
    "distributed": ({"ranks": 2, "seq_len": 2048, "form": "gather", "dtype": "bfloat16"}, "bfloat16"),
}


def test_each_panel_is_walked():
    rooms = {path.parent.name for path in (checkout() / "nanolib" / "experiments").glob("*/panel.py")}
    assert set(PANELS) == rooms - {"summary"}


@pytest.mark.parametrize("name", PANELS)
def test_what_its_controls_stand_for_is_predicted_and_would_be_measured(name, tmp_path, monkeypatch):
    room = {part: importlib.import_module(f"nanolib.experiments.{name}.{part}") for part in ("cases", "panel")}
    made = []

    class Kept(Panel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    monkeypatch.setattr(sweep, "live_front_end", lambda: True)
    monkeypatch.setattr(room["panel"], "Panel", Kept)
    show = getattr(room["panel"], f"{name}_panel")
    changed = {"overrides": {"num_layers": 1}} if "overrides" in room["cases"].Params.model_fields else {}
    assert show(room["cases"].Params(**changed)) is made[0].widget
    values, said = PANELS[name]
    assert set(values) <= set(made[0].controls)
    for control, value in values.items():
        made[0].controls[control].value = value
    params = made[0].params()
    assert said in " ".join(map(str, room["cases"].cases(params))) and "<b>" not in made[0].predicted.value
    assert not made[0].measure.disabled and name == params.NAME
    monkeypatch.setattr(sweep, "live_front_end", lambda: False)
    assert show(room["cases"].Params()) is None
