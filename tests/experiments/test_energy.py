"""Energy: a machine without a sensor, and a recording of power, which is never like a reading."""

import pytest

from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy.view import overhead_table
from nanolib.experiments.model.case import ModelCase
from nanolib.meters.recording import Trace
from nanolib.store import Store
from tests.experiments.own import TINY
from tests.measuring import rows_of
from tests.shown import CHARTS, VERDICTS


def test_what_a_recording_gives_is_replayed_in_rows_words_and_pictures(tmp_path):
    """Twenty samples per second, the first of them at a later time than zero."""
    lines = [f"{1000 + at / 20},{102 - 2 * (at % 2)}\n" for at in range(2000)]
    file = tmp_path / "trace.csv"
    file.write_text("t_s,power_w\n" + "".join(lines) + "1100,0.5\n")  # it is switched off
    params = energy.Params(
        power_trace=str(file),
        phases=["prefill"],
        overrides=TINY,
        seq_lens=[8],
        device="cpu",
        window_s=0.7,
        profiling=[],
        budget_s=0.02,
    )
    rows = rows_of(energy, params, tmp_path)
    read = rows[rows.metric.isin(["energy", "power", "energy_per_token"]) & rows.estimate.notna()]
    assert set(read.provenance) == {"replayed"} and set(read.method) == {"replay"}
    assert read[read.metric == "power"].estimate.between(99, 103).all()
    assert "] (prefill) in a replayed trace." in "\n".join(VERDICTS["energy"](rows))
    for name in ("energy_per_token", "power_over_time"):
        text = str(CHARTS[name](rows).to_dict())
        assert "replayed from a recording" in text and "Measured by a sensor" not in text


def test_the_flops_of_a_prefill_are_of_the_logits_that_it_computes():
    params = energy.Params(overrides=TINY, phases=["prefill"], seq_lens=[32], batch_size=2)
    (case,) = energy.cases(params)
    forward = ModelCase(*case.shape, "inference")
    call = case.model_case.step(0).generation.prefill
    row = next(case._energy_rows(call, params, Trace()))
    config = forward.config
    others = 2 * 2 * 31 * config.d_model * config.vocab_size  # the head, of all positions but one
    assert row.estimate == forward.formulas()["flops"] - others
    assert "flops" not in case.predict()


def test_a_machine_without_a_sensor_has_no_measured_joule(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    params = energy.Params(
        phases=["decode"],
        overrides=TINY | {"num_layers": 2},
        seq_lens=[32],
        new_tokens=8,
        window_s=1.1,
        budget_s=0.2,
    )
    rows = rows_of(energy, params, tmp_path)
    assert set(rows.status) == {"ok"}
    joules = rows[rows.metric.isin(["energy", "power", "energy_per_token"])]
    if set(joules.method) == {"utilisation"}:
        assert set(joules.provenance) == {"estimated"} and (joules.low < joules.high).all()
    layer = rows[rows.metric == "layer_energy"]
    assert set(layer.provenance) == {"estimated"}  # attributed, whatever the sensor

    found = rows[rows.metric == "layer_time"]
    details = list(found.details)
    layers = "embedding blocks.0 blocks.1 norm head"
    assert " ".join(one["layer"] for one in details) == layers
    assert sum(one["share"] for one in details) == pytest.approx(1)
    assert {"attention_fused", "gate", "between"} < {*details[1]["operations_ms"]}
    with Store(tmp_path / "results.sqlite") as store:
        detailed, tokens, samples = (
            store.connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in (
                "(SELECT call FROM ops UNION SELECT call FROM statistics)",
                "tokens",
                "power_samples",
            )
        )
        assert tokens == found.n.iloc[0] + detailed > found.n.iloc[0] and samples > 0
    assert list(overhead_table(rows)["mode"]) == ["again", "minimal", "standard", "deep"]
    assert "Most of the forward pass is spent in" in "\n".join(VERDICTS["energy"](rows))
