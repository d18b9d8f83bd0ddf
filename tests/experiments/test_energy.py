"""Energy: a machine without a sensor, and a recording of power in the place of one, never like a reading."""

import pytest

from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy.live import LivePower
from nanolib.experiments.energy.view import energy_table, overhead_table
from nanolib.experiments.energy.view import verdict as energy_findings
from nanolib.meters.energy.source import ReplaySource, read_trace
from nanolib.run import sweep
from tests.experiments.own import TINY
from tests.measuring import rows_of
from tests.shown import CHARTS, VERDICTS
from tests.waiting import until


def _trace(folder, text):
    file = folder / "trace.csv"
    file.write_text(text)
    return file


def test_a_recording_begins_at_zero(tmp_path):
    assert read_trace(_trace(tmp_path, "t_s,power_w\n1000,5\n1000.5,7\n")) == (
        [0.0, 0.5],
        [5.0, 7.0],
    )


def test_what_it_gives_is_replayed_in_rows_words_and_pictures(tmp_path):
    lines = "\n".join(f"{at / 20},{100 if at % 2 else 102}" for at in range(2000))
    file = _trace(tmp_path, f"t_s,power_w\n{lines}\n")
    given = {"phases": ["prefill"], "overrides": TINY, "seq_lens": [8], "device": "cpu"}
    given |= {"window_s": 0.7, "idle_s": 0.6, "profiling": ["minimal"], "budget_s": 0.02}
    params = energy.Params(power_trace=str(file), **given)
    assert isinstance(params.sources()[0], ReplaySource)
    rows = rows_of(energy, params, tmp_path)
    read = rows[rows.metric.isin(["energy", "power", "energy_per_token"]) & rows.estimate.notna()]
    assert set(read.provenance) == {"replayed"} and set(read.method) == {"replay"}
    assert read[read.metric == "power"].estimate.between(99, 103).all()
    assert " W (prefill) in a replayed trace." in "\n".join(VERDICTS["energy"](rows))
    for name in ("energy_per_token", "power_over_time"):
        text = str(CHARTS[name](rows).to_dict())
        assert "replayed from a recording" in text and "Measured by a sensor" not in text


def test_the_live_view_draws_a_recording_by_phase_and_says_when_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    lines = "\n".join(f"{at / 20},{40 + at % 2}" for at in range(60))
    trace = str(_trace(tmp_path, f"t_s,power_w\n{lines}\n"))
    shape = {"overrides": TINY, "seq_lens": [32], "new_tokens": 8}
    params = energy.Params(**shape, power_trace=trace, idle_s=0.5, window_s=0.5)
    live = LivePower(params)
    live.start.click()
    until(lambda: "power not measured: the recording has ended" in live.said.value)
    live.stop.click()
    live._thread.join(timeout=60)
    points = [row for rows in live.chart.chart.to_dict()["datasets"].values() for row in rows]
    power = [row for row in points if "low" in row]
    assert [row["series"] for row in power[:2]] == ["idle", "prefill"]
    read = [row for row in power if row["y"]]
    assert all(39 <= row["y"] <= 42 and not row["sure"] for row in read)  # none of this machine
    speed = [row for row in points if "y" in row and "low" not in row]
    assert speed[0]["series"] == "prefill" and speed[0]["y"] > 0


SMALL = {
    "presets": ["decoder_tiny"],
    "overrides": {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 300},
    "seq_lens": [32],
    "window_s": 1.1,
    "idle_s": 0.2,
    "budget_s": 0.2,
    "new_tokens": 8,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOLIB_OUTPUT", str(tmp_path_factory.mktemp("energy")))
        run = sweep.measure(
            energy,
            energy.Params(**SMALL, phases=["decode"], detail_every_n_calls=4),
            progress=False,
        )
        run.finish()
    yield run.measurements(samples=True), run.store
    run.store.close()


def test_a_machine_without_a_sensor_has_no_measured_joule(rows):
    rows, store = rows
    assert set(rows.status) == {"ok"}
    assert len(energy_table(rows)) == 1  # what looks into layers is not in it
    joules = rows[
        rows.metric.isin(["energy", "power", "energy_per_token", "energy_delay", "layer_energy"])
    ]
    if set(joules.method.str.removeprefix("attributed:time_share ")) == {"utilisation"}:
        assert set(joules.provenance) == {"estimated"} and (joules.low < joules.high).all()
    layer = rows[rows.metric == "layer_energy"]
    assert set(layer.provenance) == {"estimated"}  # attributed, whatever the sensor

    found = rows[rows.metric == "layer_time"]
    details = list(found.details)
    names = ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    assert [one["layer"] for one in details] == names
    assert sum(one["share"] for one in details) == pytest.approx(1)
    assert {"attention_fused", "gate", "between"} < {*details[1]["operations_ms"]}
    sections = store.trace("sections").name.to_list()
    assert sections == ["idle", "decode", "decode"]
    tokens, per_layer = store.trace("tokens"), store.trace("layers")
    deep_passes = store.trace("ops").call.nunique()
    assert len(tokens) == found.n.iloc[0] + deep_passes and deep_passes > 0
    assert set(per_layer.layer) > {"model", "embedding", "blocks.0.mlp.down", "head"}
    assert not store.trace("power_samples").empty

    costs = overhead_table(rows)
    assert list(costs["mode"]) == ["again", "minimal", "standard", "deep"]
    assert (costs.wall_low <= costs.wall).all() and (costs.wall <= costs.wall_high).all()
    findings = "\n".join(map(str, energy_findings(rows)))
    assert "Most of the time is spent in" in findings
    assert "The profiling overhead is" in findings or "used the machine" in findings
