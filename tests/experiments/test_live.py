from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy.live import LivePower
from tests.waiting import until

SMALL = {
    "presets": ["decoder_tiny"],
    "overrides": {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 300},
    "seq_lens": [32],
    "new_tokens": 8,
}


def test_the_live_view_draws_a_recording_by_phase_and_says_when_it_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    trace = tmp_path / "power.csv"
    trace.write_text("t_s,power_w\n" + "".join(f"{at / 20},{40 + at % 2}\n" for at in range(60)))
    live = LivePower(energy.Params(**SMALL, power_trace=str(trace), idle_s=0.5, window_s=0.5))
    live.start.click()
    until(lambda: "no power: the recording has ended" in live.said.value)
    points = [row for rows in live.chart.chart.to_dict()["datasets"].values() for row in rows]
    power = [row for row in points if "low" in row]
    assert [row["series"] for row in power[:2]] == ["idle", "prefill"]
    assert all(
        39 <= row["y"] <= 42 and row["sure"] is False for row in power
    )  # a recording, no reading of this machine
    speed = [row for row in points if "y" in row and "low" not in row]
    assert speed[0]["series"] == "prefill" and speed[0]["y"] > 0
    live.stop.click()
    live._thread.join(timeout=60)
