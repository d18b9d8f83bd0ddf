from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy.live import LivePower, live_panel
from tests.waiting import until

SMALL = {
    "presets": ["decoder_tiny"],
    "overrides": {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 300},
    "seq_lens": [32],
    "new_tokens": 8,
}


def test_a_batch_run_has_no_live_view(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert live_panel(energy.Params(**SMALL)) is None


def test_the_live_view_draws_a_recording_by_phase_and_says_when_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    trace = tmp_path / "power.csv"
    trace.write_text("t_s,power_w\n" + "".join(f"{at / 20},{40 + at % 2}\n" for at in range(60)))
    live = LivePower(energy.Params(**SMALL, power_trace=str(trace), idle_s=0.5, window_s=0.5))
    live.start.click()
    until(lambda: "no power to draw: the recording has ended" in live.said.value)
    points = [row for rows in live.chart.chart.to_dict()["datasets"].values() for row in rows]
    assert [row["phase"] for row in points[:3]] == ["idle", "prefill", "decode"]
    assert all(39 <= row["watts"] <= 42 for row in points[:3])
    assert points[0]["tokens_per_second"] is None and points[1]["tokens_per_second"] > 0
    live.stop.click()
    live._thread.join(timeout=60)
