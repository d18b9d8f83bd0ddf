import time

from nanolib import explore
from nanolib.experiments import energy
from nanolib.explore.live import LivePower

SMALL = {
    "presets": ["decoder_tiny"],
    "overrides": {"num_layers": 2, "d_model": 64, "num_heads": 4, "vocab_size": 300},
    "seq_lens": [32],
    "new_tokens": 8,
}


def test_a_batch_run_shows_no_panel(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    assert explore.live_panel(energy.Params(**SMALL)) is None and explore.energy_panel(energy.Params(**SMALL)) is None


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
