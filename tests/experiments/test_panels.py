import importlib
import shlex
import time

import psutil
import pytest

from nanolib.experiments import ALL
from nanolib.experiments.attention import cases as attention
from nanolib.experiments.attention import panel as attention_panel
from nanolib.experiments.distributed import cases as distributed
from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy import panel as energy_panel
from nanolib.experiments.energy.live import LivePower, live_panel
from nanolib.experiments.model import cases as model
from nanolib.experiments.panel import Panel
from nanolib.experiments.summary import cases as summary
from nanolib.experiments.summary import panel as summary_panel
from nanolib.measurement import Status
from nanolib.paths import checkout
from nanolib.run import sweep
from nanolib.run.lock import device_lock
from nanolib.run.suite import jobs
from nanolib.store import Run, Store
from tests.report.generated import decode_case
from tests.report.rows import MACHINE, ended

SMALL = {
    "presets": ["decoder_tiny"],
    "overrides": {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 300},
    "seq_lens": [32],
    "new_tokens": 8,
}


def test_a_batch_run_shows_no_panel(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert live_panel(energy.Params(**SMALL)) is None and energy_panel.energy_panel(energy.Params(**SMALL)) is None


def test_the_live_view_draws_a_recording_by_phase_and_says_when_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    trace = tmp_path / "power.csv"
    trace.write_text("t_s,power_w\n" + "".join(f"{at / 20},{40 + at % 2}\n" for at in range(60)))
    live = LivePower(energy.Params(**SMALL, power_trace=str(trace), idle_s=0.5, window_s=0.5))
    live.start.click()
    _wait(lambda: "no power to draw: the recording has ended" in live.said.value)
    points = [row for rows in live.chart.chart.to_dict()["datasets"].values() for row in rows]
    assert [row["phase"] for row in points[:3]] == ["idle", "prefill", "decode"]
    assert all(39 <= row["watts"] <= 42 for row in points[:3])
    assert points[0]["tokens_per_second"] is None and points[1]["tokens_per_second"] > 0
    live.stop.click()
    live._thread.join(timeout=60)


def test_the_live_view_follows_generation_and_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    live = LivePower(energy.Params(**SMALL))
    before = live.chart.chart
    live.start.click()
    end = time.monotonic() + 60
    while len(live._points) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert "no sensor was found" in live.said.value and live.chart.chart is not before and live.start.disabled
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


def test_the_prediction_follows_the_controls_at_once_and_says_what_does_not_fit(panel):
    panel._ceilings = {"float32": 1e11, "copy": 1e10}
    for n in (64, 128, 256, 512):
        panel.controls["seq_len"].value = n
    (said,) = panel.chart.params.foreseen
    assert (said["what"], said["n"]) == ("window 256", 512) and said["ms"] > 0 and not panel.measure.disabled
    _wait(lambda: "n=512" in panel.predicted.value)  # of four moves the last is planned
    assert "seq_lens=[512]" in panel.command.text
    panel.controls["kind"].value = "random"
    assert panel.controls["window"].disabled
    panel.controls["kind"].value = "strided"
    assert not panel.controls["window"].disabled
    panel.controls["heads"].value = 7
    assert panel.params().num_heads == 7 and panel.chart.params.foreseen[0]["ms"] != said["ms"]


def test_what_was_predicted_stays_when_a_browser_draws_late(panel):
    assert panel.chart.spec["params"][0]["value"] == []
    panel._ceilings = {"float32": 1e11, "copy": 1e10}
    panel.controls["seq_len"].value = 64
    told = panel.chart.params.foreseen
    panel.chart.set_state({"_params": {"foreseen": []}})  # what it began with
    assert len(told) == 1 and panel.chart.params.foreseen == panel.chart._params["foreseen"] == told


def test_a_prediction_is_there_from_the_start_where_ceilings_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr("nanolib.experiments.panel.known_ceilings", lambda *_: {"float32": 1e11, "copy": 1e10})
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    panel = _panels("attention", monkeypatch)(attention.Params())
    (said,) = panel.chart.spec["params"][0]["value"]
    assert said["n"] == panel.controls["seq_len"].value and said["ms"] > 0


def test_where_no_formula_speaks_of_a_case_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    panel = _panels("fp8", monkeypatch)(importlib.import_module("nanolib.experiments.fp8.cases").Params())
    _wait(lambda: panel.predicted.value == "<i>No formula predicts this case</i>")
    assert _panels("attention", monkeypatch)(attention.Params()).chart.spec["autosize"] == {
        "type": "pad",
        "resize": True,
    }


def test_without_ceilings_it_says_what_tells_them(panel):
    _wait(lambda: "measure once, or run nano doctor" in panel.predicted.value)
    assert panel.chart.params.foreseen == []


def test_values_that_do_not_fit_are_a_line_and_cannot_be_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    panel = _panels("model", monkeypatch)(model.Params())
    panel.controls["seq_len"].value = 8192
    assert "<b>" in panel.predicted.value and "8192" in panel.predicted.value and panel.measure.disabled
    panel.controls["seq_len"].value = 64
    _wait(lambda: "<b>" not in panel.predicted.value)
    assert not panel.measure.disabled


@pytest.mark.slow
def test_a_measured_point_stands_in_the_chart_and_is_saved_when_asked_for(panel, tmp_path):
    panel.controls["seq_len"].value = 64
    before = panel.chart.chart
    panel.measure.click()
    assert panel.measure.disabled and not panel.cancel.disabled
    assert panel.said.value.startswith("Starting window 256 n=64")
    _wait(lambda: not panel.measure.disabled)
    assert "not kept yet" in panel.said.value and panel.chart.chart is not before
    (drawn,) = [row for rows in panel.chart.chart.to_dict()["datasets"].values() for row in rows]
    assert (drawn["what"], drawn["n"], drawn["here"]) == ("window 256", 64, True)
    assert drawn["low"] <= drawn["ms"] <= drawn["high"] and drawn["predicted"] > 0  # of the ceilings of this run
    assert panel.measured.value.count("<td") == 5 and "window" in panel.measured.value
    assert panel.chart.params.foreseen == []  # its prediction is the one that it was measured beside
    _wait(lambda: "measure once" not in panel.predicted.value)
    panel.controls["seq_len"].value = 128
    assert panel.chart.params.foreseen[0]["n"] == 128  # and now they are known
    panel.controls["seq_len"].value = 64
    assert panel.chart.params.foreseen == []
    with Store(tmp_path / "results.sqlite") as store:
        assert store.runs().empty
    panel.save.click()
    with Store(tmp_path / "results.sqlite") as store:
        assert list(store.runs().status) == ["done"] and panel.save.disabled


def test_of_one_model_what_it_does_is_measured_and_nothing_beside(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    panel = _panels("model", monkeypatch)(model.Params(peak_remedies=["checkpoint"], generation_batch_sizes=[4]))
    panel.controls["train"].value = True
    modes = [case.factors["mode"] for case in model.cases(panel.params()) if "name" in case.factors]
    assert modes == ["inference", "training", "generation"]


def test_what_could_not_be_measured_is_said_with_the_reason(panel):
    for control, value in {"kind": "dense (math)", "seq_len": 8192, "heads": 256}.items():
        panel.controls[control].value = value
    panel.measure.click()
    _wait(lambda: not panel.measure.disabled)
    assert panel.said.value.startswith("dense (math) seq_len=8192 batch_size=1 dtype=float32: oom_predicted: it needs")
    assert panel.said.value.endswith("; not kept yet.") and "Measured" not in panel.said.value


def test_settings_that_do_not_fit_once_it_has_ended_cannot_be_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    panel = _panels("model", monkeypatch)(model.Params())
    with device_lock("cpu", "another run"):
        panel.measure.click()
        _wait(lambda: "waiting for cpu" in panel.said.value)
        panel.controls["seq_len"].value = 8192
        panel.cancel.click()
        _wait(lambda: panel.said.value == "Cancelled." and not panel._busy)
    _wait(lambda: "8192" in panel.predicted.value)
    assert panel.measure.disabled


def test_a_chart_over_other_things_than_a_control_shows_what_is_like_its_case(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    with Store(tmp_path / "notebook.sqlite") as store:
        cases = [decode_case({"fused": ((8, 9, 10), 2, [(1, 2, 3)] * 3)}, seq_len=n) for n in (2048, 4096)]
        store.add(
            Run("distributed", MACHINE, rows={str(at): (of, [ended(), *found]) for at, (of, found) in enumerate(cases)})
        )
        rows = store.measurements(samples=True)
    panel = _panels("distributed", monkeypatch)(distributed.Params(seq_lens=[4096]), rows)
    titles = lambda: [part["title"]["text"] for part in panel.chart.spec["hconcat"]]  # noqa: E731
    assert titles() == ["n = 4,096, float32"] and panel.controls["seq_len"].value == 4096
    panel.controls["seq_len"].value = 2048
    _wait(lambda: titles() == ["n = 2,048, float32"])
    panel.controls["seq_len"].value = 1024
    _wait(lambda: "nothing was measured with these settings yet" in str(panel.chart.spec["datasets"]))


def test_what_is_measured_again_takes_the_place_of_what_it_was_and_the_newest_is_listed_first(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    notebook, first, again, cut = (
        decode_case({form: ((8, ms, 90), 2, [(1, 2, 3)] * 3) for form in forms}, seq_len=2048, world=world)
        for forms, ms, world in (("fg", 9, 2), ("f", 10, 2), ("f", 11, 1), ("f", 12, 8))
    )
    with Store(tmp_path / "notebook.sqlite") as store:
        store.add(Run("distributed", MACHINE, rows={"0": (notebook[0], [ended(), *notebook[1]])}))
        rows = store.measurements(samples=True)
    panel = _panels("distributed", monkeypatch)(distributed.Params(seq_lens=[2048]), rows)
    with Store(panel._path) as store:
        for at, (of, found) in enumerate((first, again)):
            store.add(Run("distributed", MACHINE, rows={str(at): (of, [ended(), *found])}))
        store.add(Run("distributed", MACHINE, rows={"cut": (cut[0], [ended(Status.STARTED)])}))
    panel._show()
    drawn = next(values for values in panel.chart.spec["datasets"].values() if "ms" in values[0])
    assert sorted((row["form"], row["ranks"], row["ms"]) for row in drawn) == [("f", 1, 11), ("f", 2, 10), ("g", 2, 9)]
    assert next(row["form"] for row in drawn) == "f"  # so that each has the colour that it had
    listed = [line.split(">")[1].split("<")[0] for line in panel.measured.value.split("<tr>")[2:]]
    assert listed == ["1", "2"]


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
    assert panel.said.value == f"Shown: everything: {len(rows)} of {len(rows)} measurements, of 1 of 1 runs"
    panel.picks["Sequence length"].value = "32"
    left = len(rows) - (rows["factor.seq_len"] == 16).sum()
    assert panel.said.value == f"Shown: sequence length 32: {left} of {len(rows)} measurements, of 1 of 1 runs"
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


def _panels(name, monkeypatch):
    """Makes the panel of a notebook, as JupyterLab would show it, of its parameters."""
    room = importlib.import_module(f"nanolib.experiments.{name}.panel")
    made = []

    class Kept(Panel):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(sweep, "live_front_end", lambda: True)
    monkeypatch.setattr(room, "Panel", Kept)

    def make(params, rows=None):
        assert getattr(room, f"{name}_panel")(params, rows) is made[-1].widget
        return made[-1]

    return make


@pytest.mark.parametrize("name", PANELS)
def test_what_its_controls_stand_for_is_predicted_and_would_be_measured_or_run_by_its_command(
    name, tmp_path, monkeypatch
):
    cases = importlib.import_module(f"nanolib.experiments.{name}.cases")
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    changed = {"overrides": {"num_layers": 1}} if "overrides" in cases.Params.model_fields else {}
    panel = _panels(name, monkeypatch)(cases.Params(**changed))
    values, said = PANELS[name]
    assert set(values) <= set(panel.controls)
    for control, value in values.items():
        panel.controls[control].value = value
    params = panel.params()
    assert said in " ".join(map(str, cases.cases(params))) and "<b>" not in panel.predicted.value
    assert not panel.measure.disabled and name == params.NAME
    words = shlex.split(panel.command.text)
    given = dict(word.split("=", 1) for word in words[5::2])
    assert words[:4] == ["nano", "run", "quick", name] and set(words[4::2]) <= {"-p"}
    (job,) = jobs.plan(ALL, words[2:4], given, {})
    assert [case.case_id for case in job.cases()] == [case.case_id for case in cases.cases(params)]


@pytest.mark.parametrize("name", PANELS)
def test_a_batch_run_has_none(name, monkeypatch):
    room = {part: importlib.import_module(f"nanolib.experiments.{name}.{part}") for part in ("cases", "panel")}
    monkeypatch.setattr(sweep, "live_front_end", lambda: False)
    assert getattr(room["panel"], f"{name}_panel")(room["cases"].Params()) is None


def test_a_wait_for_the_device_is_told_and_can_be_cancelled(panel):
    with device_lock("cpu", "another run"):
        panel.measure.click()
        _wait(lambda: "waiting for cpu: in use by" in panel.said.value and "another run" in panel.said.value)
        panel.cancel.click()
        _wait(lambda: panel.said.value == "Cancelled.")
    assert panel._new().empty


def test_the_memory_panel_plans_the_newest_setting_and_says_what_would_fit(tmp_path, monkeypatch):
    from nanolib.experiments.model import memory_panel

    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert memory_panel.memory_panel(model.Params()) is None
    panel = memory_panel.MemoryPanel(model.Params())
    _wait(lambda: panel.said.value == "fits: inference; decoding; training; training, checkpointed")
    held = panel.chart.params.held
    assert {part["use"] for part in held} == {"inference", "decoding", "training", "training, checkpointed"}
    assert {"name": "memory", "value": 24.0} in panel.chart.spec["params"]
    panel.chart.set_state({"_params": {"held": [], "memory": 0.0}})  # as a browser does that drew only now
    assert panel.chart._params == {"held": held, "memory": 24.0}
    for batch in (8, 64, 512):  # the last one wins
        panel.controls["batch_size"].value = batch
    _wait(lambda: "training needs" in panel.said.value and "batch " in panel.said.value)
    assert "--batch-size 512" in panel.command.text and panel.chart.params.memory == 24.0
    assert sum(p["gib"] for p in panel.chart.params.held) > sum(p["gib"] for p in held)
    panel.controls["seq_len"].value = 8192
    panel.controls["model"].value = "small"
    _wait(lambda: "small" in panel.command.text and "training needs" in panel.said.value)
