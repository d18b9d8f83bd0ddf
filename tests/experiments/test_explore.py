import json
import math
import shlex
from types import SimpleNamespace

import pytest

from nanolib.experiments import ALL, MEASURING
from nanolib.experiments.explore import Explore, explore
from nanolib.measurement import Provenance
from nanolib.meters.power import Found, Reading
from nanolib.params import plan_jobs
from nanolib.run import sweep
from nanolib.store import Store
from tests.experiments.own import TINY
from tests.waiting import until

# Notebook → its parameters, and controls with their new values as a person writes them.
WALKED = {
    "attention": (
        {"quality_attentions": [], "attention_types": ["dense"], "seq_lens": [64]},
        {"seq_lens": "[32]", "causal": False, "budget_s": "0.05"},
    ),
    "model": (
        {"overrides": TINY, "seq_lens": [32]},
        {"seq_lens": "[16]", "train": False, "new_tokens": "4"},
    ),
    "warmup": ({"overrides": TINY}, {"warmup_steps": "[0, 3]", "directions": "[forward]"}),
    "energy": ({"overrides": TINY, "seq_lens": [32]}, {"phases": "[decode]", "batch_size": "2"}),
    "fp8": ({"presets": []}, {"parity_recipes": "[fp8_rowwise]", "parity_seeds": "3"}),
    "distributed": ({}, {"world_sizes": "[2]", "algorithms": "[gather]"}),
}


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Makes the controls of a notebook, as JupyterLab would show them."""
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))

    def make(name, **changes):
        experiment = ALL[name]()
        return Explore(experiment, experiment.Params(**WALKED[name][0] | changes))

    return make


def test_a_live_notebook_has_controls_and_a_batch_run_has_none(monkeypatch):
    experiment = ALL["energy"]()
    monkeypatch.setattr(sweep, "is_interactive", lambda: False)
    assert explore(experiment, experiment.Params()) is None
    monkeypatch.setattr(sweep, "is_interactive", lambda: True)
    assert explore(experiment, experiment.Params()).children


@pytest.mark.parametrize("name", MEASURING)
def test_what_the_controls_hold_is_predicted_and_is_what_the_command_runs(name, shown):
    _, changed = WALKED[name]
    panel = shown(name)
    assert panel.params() == panel._params  # every default survives its control
    for control, value in changed.items():
        panel.controls[control].value = value
    found = panel.params()
    for key in changed:
        assert getattr(found, key) != getattr(panel._params, key)
    panel.predict.click()
    assert "<b>" not in panel.predicted.value and "redict" in panel.predicted.value
    assert not panel.measure.disabled
    words = shlex.split(panel.command.text)
    given = dict(word.split("=", 1) for word in words[5::2])
    assert words[:4] == ["nano", "run", "quick", name] and set(words[4::2]) <= {"-p"}
    (job,) = plan_jobs(ALL, words[2:4], given, {})
    assert job.cases() == ALL[name]().cases(found)


def test_a_value_that_does_not_fit_is_a_line_and_cannot_be_measured(shown):
    panel = shown("attention")
    control = panel.controls["attention_types"]
    before, control.value = control.value, "[{kind: nothing}]"
    assert panel.predicted.value.startswith("<b>") and "nothing" in panel.predicted.value
    assert panel.measure.disabled and panel.predict.disabled and not panel.command.text
    control.value = before
    assert not panel.predicted.value and not panel.measure.disabled and not panel.predict.disabled
    assert panel.command.text.startswith("nano run")
    panel = shown("model", model="nowhere_at_all:build", overrides={})
    panel.predict.click()
    assert panel.predicted.value.startswith("<b>model: ")
    assert "nowhere_at_all" in panel.predicted.value


def _in_this_process(serve, *given, **_):
    sent = []
    serve(sent.append, *given)
    yield from sent


class _Source:
    """A counter of 40 J per second, which the driver refuses to read a third time."""

    name, of, period_s, provenance = "counter", "gpu 0", 0.1, Provenance.MEASURED
    reads = 0

    def read(self):
        self.reads += 1
        joules = 40.0 * self.reads if self.reads < 3 else math.nan
        return Reading(float(self.reads), joules=joules)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            Found([_Source()], {}),
            ["Power of gpu 0: 40 W", "Power of gpu 0: not measured ("],
        ),
        (
            Found([], {"NVIDIA (NVML)": "no driver"}),
            ["Power not measured. NVIDIA (NVML): no driver"],
        ),
    ],
)
def test_power_is_shown_while_a_case_runs_or_why_there_is_none(shown, monkeypatch, found, said):
    monkeypatch.setattr("nanolib.experiments.explore.find_sources", lambda: found)
    panel, lines, alive = shown("attention"), [], iter([True] * len(said) + [False])
    panel.power.observe(lambda change: lines.append(change.new), names="value")
    panel._show_power(SimpleNamespace(is_alive=lambda: next(alive), join=lambda _: None))
    assert len(lines) == len(said) + 1 and not lines[-1]
    assert all(map(str.startswith, lines, said)), lines


@pytest.mark.usefixtures("small_ceilings")
def test_what_is_measured_stands_in_the_chart_and_is_kept_when_that_is_asked_for(
    shown, monkeypatch
):
    monkeypatch.setattr("nanolib.run.group.call_in_process", _in_this_process)
    panel = shown("attention", backward=False, budget_s=0.05)
    panel.predict.click()
    assert "keep a measurement, or run nano doctor" in panel.predicted.value
    before = panel.chart.chart
    assert "select Measure" in json.dumps(before.to_dict())
    panel.measure.click()
    assert panel.measure.disabled and not panel.cancel.disabled
    assert panel.status.value == "Starting …"
    until(lambda: not panel.measure.disabled)
    assert panel.status.value == "Measured. Results are not stored yet."
    assert panel.chart.chart is not before
    assert "dense" in panel.measured.value and "64" in panel.measured.value
    assert "keep a measurement" in panel.predicted.value  # beside what was measured
    panel.keep.click()
    with Store() as store:
        assert list(store.runs().status) == ["done"] and panel.keep.disabled
    panel.predict.click()
    assert "nano doctor" not in panel.predicted.value and "latency (ms)" in panel.predicted.value
    panel.measure.click()
    panel.cancel.click()
    until(lambda: not panel.measure.disabled)
    assert panel.status.value == "Canceled." and panel.keep.disabled
    monkeypatch.setattr(sweep, "measure", lambda *_, **__: 1 / 0)
    panel.measure.click()
    until(lambda: not panel.measure.disabled)
    assert panel.status.value == "ZeroDivisionError: division by zero" and panel.keep.disabled
