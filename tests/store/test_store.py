"""Runs and rows come back as they were stored."""

from types import SimpleNamespace

import numpy as np
import pytest

from nanolib.measurement import BadInput, Flag, Measurement, exact
from tests.store.rows import make_run


def test_a_case_is_replaced_whole_or_not_at_all(store):
    run_id = store.add(make_run())
    bad = exact("flops", 1, scope="x", details={"a": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_case(run_id, "case1", {}, [exact("flops", 1), bad])
    assert len(store.measurements()) == 2
    store.write_case(run_id, "case1", {}, [exact("flops", 7)])
    assert list(store.measurements().estimate) == [7]


@pytest.mark.parametrize(
    "text", ["", "é 漢 \u2028 \x1b[31m\U0010ffff", "'; DROP TABLE runs; --{label} %s ?\n"]
)
def test_whatever_a_run_and_a_measurement_hold_comes_back_as_it_was(store, text):
    details = {text: [None, True, 2**53, 5e-324, -1.7e308, {text: text}]}
    rest = {"message": text, "flags": tuple(Flag), "details": details, "confidence": 0.9}
    row = Measurement(
        "latency", 0.1 + 0.2, -1e300, 1e300, predicted=1.2, samples=(5e-324, -0.0, 1 / 3), **rest
    )
    factors = {"a": text, "b": details, "n": np.int64(8)}
    store.add(make_run("r", text, rows={"case": (factors, [row])}))
    (back,) = store.measurements(samples=True).to_dict("records")
    of_run = {"run_id": "r", "experiment": "attention", "machine_id": "m1", "label": text}
    of_case = {"case_id": "case", "factor.a": text, "factor.n": 8, "factors": factors, "unit": "ms"}
    expected = vars(row) | of_run | of_case
    back["samples"], back["flags"] = tuple(back["samples"]), tuple(back["flags"])
    assert {name: back[name] for name in expected} == expected
    assert (store.runs().label[0], store.runs().status[0]) == (text, "done")
    assert list(store.machines().gpus) == [[{"name": "g"}]]


def test_power_samples_are_those_of_the_newest_run_or_the_one_named(store):
    store.add(make_run("a"))
    store.add(make_run("b"))
    store.add_power_samples([{"t_s": 1.25, "watts": 3.0, "low": 2.0, "high": 4.0}])
    store.add_power_samples(
        [SimpleNamespace(t_s=2.0000004, joules=7.0)], run_id="a", case_id="c", source="mine"
    )
    with pytest.raises(BadInput, match="has no t_s, or no power"):
        store.add_power_samples([{"t_s": 3.0, "watts": 1.0}, {"watts": 1.0}])  # both are refused
    with pytest.raises(BadInput, match="run: nowhere is not in the database; add it first"):
        store.add_power_samples([], run_id="nowhere")
    store.commit_transaction()
    assert _samples(store) == [
        ("b", "", "power", 1_250_000, 3.0, None, 2.0, 4.0),
        ("a", "c", "mine", 2_000_000, None, 7.0, None, None),
    ]


def _samples(store):
    return [row[1:] for row in store.connection.execute("SELECT * FROM power_samples ORDER BY id")]
