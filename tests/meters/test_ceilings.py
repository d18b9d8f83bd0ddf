"""Ceilings of products and copies, and rates."""

from dataclasses import replace

from nanolib.measurement import Flag, Measurement
from nanolib.meters import ceilings
from nanolib.meters.ceilings import measure_ceiling, rate


def test_ceilings_are_two_operations_per_product_and_two_bytes_per_byte(monkeypatch):
    asked = []

    def measured(call, rel_ci, budget_s, *, device, scope, collect=None):
        call()
        asked.append((rel_ci, budget_s, device))
        return Measurement("latency", 10.0, 5.0, 20.0, 0.95, 20, (10.0,), method="m", scope=scope)

    monkeypatch.setattr(ceilings, "measure", measured)
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 64})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**21})
    names = ("float32", "float64", "bfloat16", "copy")
    found = {name: measure_ceiling("cpu", name, 4.0) for name in names}
    assert all(row.scope == name for name, row in found.items())
    amounts = (2 * 64**3, 2 * 64**3, 2 * 32**3, 2 * 2**21)
    assert [row.estimate for row in found.values()] == [100 * amount for amount in amounts]
    assert found["float32"].message == "matrix product 64³, in a burst of 4 s"
    assert found["copy"].message == "copy of 2 MiB"
    assert asked == [(0.02, 4.0, "cpu")] * 4


def test_a_rate_turns_the_interval_round_and_keeps_what_it_came_from():
    latency = Measurement(
        "latency", 2.0, 1.0, 4.0, 0.95, 20, (2.0, 4.0), method="perf_counter", scope="decode"
    )
    row = rate("tokens_per_second", 8, replace(latency, flags=(Flag.GOT_SLOWER,)), message="how")
    assert (row.low, row.estimate, row.high, row.samples) == (2000, 4000, 8000, (4000, 2000))
    kept = ("decode", "amount/perf_counter", (Flag.GOT_SLOWER,))
    assert (row.scope, row.method, row.flags) == kept
    alone = rate("tokens_per_second", 8, replace(latency, low=None, high=None))
    assert (alone.low, alone.estimate, alone.high, alone.scope) == (None, 4000.0, None, "decode")
