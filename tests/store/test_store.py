"""Runs and rows as they go in and come out, and old ones as they go."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanolib.measurement import BadInput, Flag, Measurement, Provenance, Status, exact
from nanolib.store import Store
from tests.store.rows import make_run


def test_a_run_comes_back_as_it_went_in(store):
    run_id = store.add(make_run(label="mine"))
    rows = store.measurements(samples=True)
    first = rows.iloc[0]
    names = ["run_id", "experiment", "label", "machine_id", "unit", "provenance", "status"]
    values = [run_id, "attention", "mine", "m1", "ms", Provenance.MEASURED, Status.OK]
    assert first[names].to_list() == values
    assert first[["estimate", "low", "high", "predicted"]].to_list() == [1.5, 1.0, 2.0, 1.2]
    assert first.factors == {"seq_len": 8, "name": "dense"} and first["factor.seq_len"] == 8
    assert first["flags"] == ["got_slower"] and first.details == {"mean": 1.5}
    assert first.samples.dtype == np.float64 and list(first.samples) == [1.0, 1.5, 2.0]
    assert list(store.runs().status) == ["done"]
    assert list(store.machines().gpus) == [[{"name": "g"}]]


def test_a_case_is_replaced_whole_or_not_at_all(store):
    run_id = store.add(make_run())
    bad = exact("flops", 1, scope="x", details={"a": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.write_case(run_id, "case1", {}, [exact("flops", 1), bad])
    assert len(store.measurements()) == 2
    store.write_case(run_id, "case1", {}, [exact("flops", 7)])
    assert list(store.measurements().estimate) == [7]


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


_FLOAT = st.floats(allow_nan=False, allow_infinity=False)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _FLOAT | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(
    factors=st.dictionaries(st.text("abc_", min_size=1, max_size=5), _JSON, min_size=1, max_size=3),
    samples=st.lists(_FLOAT, max_size=5),
    ends=st.tuples(_FLOAT, _FLOAT, _FLOAT).map(sorted),
    message=_TEXT,
    details=st.dictionaries(_TEXT, _JSON, max_size=3),
    flags=st.lists(st.sampled_from(list(Flag)), unique=True, max_size=3),
    label=_TEXT,
)
def test_whatever_a_measurement_holds_comes_back_as_it_was(
    factors, samples, ends, message, details, flags, label
):
    low, estimate, high = ends
    ends = {"estimate": estimate, "low": low, "high": high, "confidence": 0.95}
    rest = {"message": message, "flags": tuple(flags), "details": details}
    row = Measurement("latency", n=len(samples), samples=tuple(samples), **ends, **rest)
    with tempfile.TemporaryDirectory() as name, Store(Path(name) / "s.sqlite") as store:
        store.add(make_run("r", label, rows={"case": (factors, [row])}))
        (back,) = store.measurements(samples=True).to_dict("records")
        assert store.runs().label.iloc[0] == label
    assert back["factors"] == factors and back["details"] == details and back["message"] == message
    assert (back["low"], back["estimate"], back["high"]) == (low, estimate, high)
    assert list(back["samples"]) == samples and list(back["flags"]) == [
        flag.value for flag in flags
    ]


def test_what_json_has_no_form_for_is_told(store):
    with pytest.raises(TypeError, match="object has no JSON form"):
        store.add(make_run("a", params={"x": object()}))
    store.add(make_run("b", params={"x": np.int64(3)}))
    assert store.runs().params.tolist() == [{"x": 3}]


def test_power_samples_are_those_of_the_newest_run_or_the_one_named(store):
    store.add(make_run("a"))
    store.add(make_run("b"))
    store.add_power_samples([{"t_s": 1.25, "watts": 3.0, "low": 2.0, "high": 4.0}])
    store.add_power_samples(
        [SimpleNamespace(t_s=2.0000004, joules=7.0)], run_id="a", case_id="c", source="mine"
    )
    with pytest.raises(BadInput, match="has no t_s, or neither watts nor joules"):
        store.add_power_samples(
            [{"t_s": 3.0, "watts": 1.0}, {"watts": 1.0}]
        )  # none of them is taken in
    store.commit_transaction()
    rows = store.trace("power_samples").astype(object).where(lambda frame: frame.notna(), None)
    assert rows.to_numpy().tolist() == [
        ["b", "", "power", 1_250_000, 3.0, None, 2.0, 4.0],
        ["a", "c", "mine", 2_000_000, None, 7.0, None, None],
    ]
    assert (
        list(store.trace("power_samples", ["a"]).run_id) == ["a"]
        and store.trace("power_samples", []).empty
    )
