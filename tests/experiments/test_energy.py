import pytest

from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy.view import energy_table, overhead_table
from nanolib.experiments.energy.view import verdict as energy_findings
from nanolib.run import sweep

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
    assert "Most of the time goes to" in findings
    assert "Profiling overhead: " in findings or "Machine busy" in findings
