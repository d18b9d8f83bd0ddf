"""The notebooks of a command share peak rates, and a share includes the interval of its rate."""

import itertools
from dataclasses import replace

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import Measurement
from nanolib.paths import LAUNCH_VARIABLE
from nanolib.run import peaks_case, sweep
from nanolib.run.peaks_case import METRICS_OF_CEILINGS, Ceiling, rate_rows

ATTENTION = {"budget_s": 0.01, "rel_ci": 0.5, "device": "cpu", "seq_lens": [16]}
ATTENTION |= {"attention_types": ["dense"], "backward": False, "quality_patterns": []}


def test_a_share_carries_the_interval_of_the_ceiling_too():
    latency = Measurement("latency", 1.0, 0.8, 1.25, 0.95, 20, (0.9, 1.0, 1.1), scope="forward")
    rate, share = rate_rows(latency, 5e7, "float32", {"float32": Ceiling.of(0.8e11, 1e11, 2e11)})
    assert (rate.low, rate.estimate, rate.high) == pytest.approx((4e10, 5e10, 6.25e10))
    assert (share.low, share.estimate, share.high) == pytest.approx(
        (4e10 / 2e11, 0.5, 6.25e10 / 0.8e11)
    )
    assert "8e+10 … 2e+11" in share.message
    assert Ceiling.of(None, 3.0, None).low == Ceiling.of(None, 3.0, None).high == 3.0


@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.parametrize("together", [True, False])
def test_notebooks_of_one_command_share_what_the_first_has_measured(store, monkeypatch, together):
    numbers, real = itertools.count(1), peaks_case.measure_ceiling

    def numbered(*given, **more):
        return replace(
            real(*given, **more), estimate=float(next(numbers)), low=0.5, high=1e3, samples=(1, 2)
        )

    monkeypatch.setattr(peaks_case, "measure_ceiling", numbered)
    monkeypatch.delenv(LAUNCH_VARIABLE, raising=False)
    if together:
        monkeypatch.setenv(LAUNCH_VARIABLE, "a-command")
    attention, found = ALL["attention"](), []
    for more in ({}, {"seq_lens": [32], "budget_s": 0.02}):
        params = attention.Params(**ATTENTION | more)
        run = sweep.measure(attention, params, store=store, progress=False)
        rows = run.measurements(samples=True)
        found.append(rows[rows["metric"].isin(METRICS_OF_CEILINGS)])
        run.finish()
    first, second = (dict(zip(part["scope"], part["estimate"], strict=True)) for part in found)
    assert first.keys() & second.keys() >= {"float32", "copy"}
    assert (first == second) == together
    said = f"measured by run {found[0]['run_id'].iloc[0][:8]} of the same command"
    assert {said in text for text in found[1]["message"]} == {together}
    assert {tuple(samples) for samples in found[1]["samples"]} == {(1.0, 2.0)}
    assert set(found[1]["low"]) == {0.5} and set(found[1]["high"]) == {1e3}
