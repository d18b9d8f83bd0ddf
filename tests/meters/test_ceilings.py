"""Ceilings of products and copies, and rates."""

from dataclasses import replace

from nanolib.measurement import Flag, Measurement
from nanolib.meters import ceilings
from nanolib.meters.ceilings import measure_ceiling, rate

LATENCY = Measurement(
    "latency", 10.0, 5.0, 20.0, 0.95, 20, (10.0, 20.0), method="perf_counter", scope="decode"
)


def test_ceilings_are_two_operations_per_product_and_two_bytes_per_byte(monkeypatch):
    def measured(call, rel_ci, budget_s, *, device, scope, collect=None):
        call()
        return replace(LATENCY, scope=scope)

    monkeypatch.setattr(ceilings, "measure", measured)
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 64})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**21})
    amounts = {"float32": 2 * 64**3, "float64": 2 * 64**3, "bfloat16": 2 * 32**3, "copy": 2 * 2**21}
    found = {name: measure_ceiling("cpu", name, 4.0) for name in amounts}
    assert {row.scope: row.estimate / 100 for row in found.values()} == amounts
    assert found["float32"].message == "matrix product 64³, in a burst of 4 s"
    assert found["copy"].message == "copy of 2 MiB"


def test_a_rate_turns_the_interval_round_and_keeps_what_it_came_from():
    row = rate("tokens_per_second", 8, replace(LATENCY, flags=(Flag.GOT_SLOWER,)))
    assert (row.low, row.estimate, row.high, row.samples) == (400, 800, 1600, (800, 400))
    kept = ("decode", "amount/perf_counter", (Flag.GOT_SLOWER,))
    assert (row.scope, row.method, row.flags) == kept
    alone = rate("tokens_per_second", 8, replace(LATENCY, low=None, high=None))
    assert (alone.low, alone.estimate, alone.high) == (None, 800, None)
