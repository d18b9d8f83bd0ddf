"""The notebooks of a command share peak rates, and a share includes the interval of its rate."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nanolib.measurement import Flag, Measurement
from nanolib.paths import LAUNCH_VARIABLE
from nanolib.run import peaks, sweep
from nanolib.run.peaks import CeilingCase, ceiling_cases, ceilings_of, rate_rows
from nanolib.stats.intervals import Interval
from tests.run.sample_experiment import Params
from tests.store.rows import make_run

LATENCY = Measurement(
    "latency", 10.0, 5.0, 20.0, 0.95, 20, (10.0, 20.0), method="perf_counter", scope="decode"
)


def test_ceilings_are_two_operations_per_product_and_two_bytes_per_byte(monkeypatch):
    def measured(call, *_, device, scope):
        call()
        return replace(LATENCY, scope=scope)

    monkeypatch.setattr(peaks, "measure", measured)
    monkeypatch.setattr(peaks, "_MATRIX", {"cpu": 64})
    monkeypatch.setattr(peaks, "_COPY_BYTES", {"cpu": 2**21})
    amounts = {"float32": 2 * 64**3, "float64": 2 * 64**3, "bfloat16": 2 * 32**3, "copy": 2 * 2**21}
    found = {name: next(CeilingCase("cpu", name, 4.0).measure(None, {})) for name in amounts}
    assert {row.scope: row.estimate / 100 for row in found.values()} == amounts
    assert found["float32"].message == "matrix product 64³, in a burst of 4 s"
    assert found["copy"].message == "copy of 2 MiB"


def test_a_rate_turns_the_interval_round_and_a_share_includes_that_of_the_peak_rate_too():
    latency = replace(LATENCY, flags=(Flag.GOT_SLOWER,))
    rates = {"float32": Interval(0.8e11, 1e11, 2e11)}
    found, share = rate_rows(latency, 5e8, "float32", rates)
    assert (found.low, found.estimate, found.high) == pytest.approx((2.5e10, 5e10, 1e11))
    assert found.samples == pytest.approx((5e10, 2.5e10))
    assert (found.scope, found.method, found.flags) == (
        "decode",
        "amount/perf_counter",
        latency.flags,
    )
    ends = 2.5e10 / 2e11, 0.5, 1e11 / 0.8e11
    assert (share.low, share.estimate, share.high) == pytest.approx(ends)
    assert "8e+10 … 2e+11" in share.message
    _, share = rate_rows(replace(latency, low=None, high=None), 5e8, "float32", rates)
    assert (share.low, share.estimate, share.high) == (None, 0.5, None)
    assert [row.metric for row in rate_rows(latency, 5e8, "float32", {})] == ["flops_per_second"]


def test_the_peak_rate_of_a_machine_is_the_newest_even_if_an_older_one_was_merged_later(store):
    for value, started in ((9.0, "2026"), (1.0, "2024")):
        run_id = store.add(
            make_run(rows={"a": ({}, [Measurement("ceiling_bytes", value, scope="copy")])})
        )
        store.update_run(run_id, started=started)
    # A rate without an interval is its own interval.
    assert ceilings_of(store, "m1") == {"copy": Interval(9.0, 9.0, 9.0)}


@pytest.mark.parametrize("launch", ["a-command/notebook", ""])
def test_notebooks_of_one_command_share_what_the_first_has_measured(store, monkeypatch, launch):
    numbers = itertools.count(1.0)

    def measured(case, *_):
        ends = 0.5, 1e3, 0.95
        yield Measurement("ceiling_bytes", next(numbers), *ends, 2, (1.0, 2.0), scope=case.ceiling)

    monkeypatch.setattr(CeilingCase, "measure", measured)
    monkeypatch.setenv(LAUNCH_VARIABLE, launch)
    found = []
    for budget_s in (0.01, 0.02, 0.02):
        cases = ceiling_cases("cpu", ["float32"], budget_s)
        experiment = SimpleNamespace(cases=lambda _, cases=cases: cases)
        rows = sweep.measure(experiment, Params(), store=store).measurements(samples=True)
        found.append(rows[rows["metric"] != "case_duration"])
    first, second, third = found
    assert list(first["estimate"]) == [1.0, 2.0]
    assert list(second["estimate"]) == ([1.0, 2.0] if launch else [3.0, 4.0])
    said = f"measured by run {first['run_id'].iloc[0][:8]} of the same command"
    for row in (*second.itertuples(), *third.itertuples()):  # The third names the first run too.
        assert (row.low, row.high, tuple(row.samples)) == (0.5, 1e3, (1.0, 2.0))
        assert (row.message == f"; {said}") == bool(launch)
