"""What charts and tables say beside their marks: the model, the link, the limits, the order in which things were measured."""

import pytest

from nanolib.experiments.distributed.view.decode import _link_words
from nanolib.experiments.energy.view import layers
from nanolib.experiments.fp8.view.parity import parity_table, parity_words
from nanolib.measurement import Flag, Measurement, Provenance
from tests.report.rows import ended


def _link(ranks, us, gb_per_s, residual):
    rows = [Measurement("link_latency", us / 1e3, n=5, scope="gloo", details={"largest_residual": residual})]
    if gb_per_s:
        rows.append(Measurement("link_bandwidth", gb_per_s * 1e9, n=5, scope="gloo"))
    return {"world_size": ranks, "forms": ["fused"]}, rows


def test_the_fit_of_the_most_ranks_is_said_with_what_it_misses(measured):
    rows = measured("distributed", [_link(2, 20, 4, 0.1), _link(4, 50, 2.5, 0.24)])
    said = "Dashed: the model, 50 µs per message, then 2.50 GB/s (gloo); off by up to 24%."
    assert _link_words(rows) == said


def test_each_mode_of_profiling_is_held_against_what_it_may_cost(measured):
    details = {"cpu": [0.0, 0.005, 0.01], "threads": 0.001, "plain_ms": 5.0, "pass_ms": None}
    cases = [
        ({"name": "tiny", "phase": "decode", "seq_len": 8, "look": mode}, [
            Measurement("overhead", 0.005, 0.001, 0.009, 0.95, 20, scope=f"decode {mode}", details=details)
        ])
        for mode in layers.MODES
    ]  # fmt: skip
    drawn = layers.profiling_overhead(measured("energy", cases)).to_dict()
    limits = {row["mode"]: row["limit"] for data in drawn["datasets"].values() for row in data if "limit" in row}
    assert {mode: limit for mode, limit in limits.items() if limit} == {"minimal": 0.01, "standard": 0.03, "deep": 0.08}


@pytest.mark.parametrize(("provenance", "said"), [(Provenance.MEASURED, ""), (Provenance.EMULATED, " (emulated)")])
def test_parity_is_called_emulated_where_it_is(measured, provenance, said):
    details = {"verdict": "equivalent", "control": False, "margin_nats": 0.0025, "tenths": None}
    row = Measurement("parity", 0.0, -1e-3, 1e-3, 0.95, 3, scope="a", details=details, provenance=provenance)
    table = parity_table(measured("fp8", [({"arm": "fp8_rowwise", "seeds": 3, "steps": 900}, [ended(), row])]))
    assert str(parity_words(table)[0]).startswith(f"fp8 rowwise{said}: equivalent after 900 steps")


def test_a_link_of_more_ranks_than_cores_is_not_the_one_that_is_told(measured):
    factors, found = _link(4, 50, 2.5, 0.24)
    flagged = [Measurement.from_dict(row.to_dict() | {"flags": [Flag.OVERSUBSCRIBED]}) for row in found]
    said = _link_words(measured("distributed", [_link(2, 20, 4, 0.1), (factors, flagged)]))
    assert said.startswith("Dashed: the model, 20 µs per message, then 4.00 GB/s")
