"""One value that a logarithmic axis cannot show takes no axis away: it is left out, and named under the title."""

import math

import altair as alt
import pandas as pd
import pytest

from nanolib.report.drawing import is_empty
from nanolib.report.frame import framed, tooltips, with_interval
from nanolib.store import Store
from tests.features import results
from tests.report.rows import ended, interval
from tests.shown import CHARTS

BAD = [0.0, -1.0, math.inf]


def _views(spec):
    """Each picture of a chart: its marks, with their data."""
    for name in ("hconcat", "vconcat", "concat"):
        for part in spec.get(name, []):
            yield from _views({"data": spec.get("data"), "datasets": spec["datasets"]} | part)
    if "layer" in spec or "encoding" in spec:
        yield [{"data": spec.get("data")} | mark for mark in spec.get("layer", [spec])]


def _on_log_axes(spec):
    """Every value of a field on a logarithmic scale, and every end of such a scale's domain."""
    for marks in _views(spec):
        for channel in ("x", "y", "color"):
            uses = [(mark, mark["encoding"][channel]) for mark in marks if channel in mark.get("encoding", {})]
            scales = [use["scale"] for _, use in uses if use.get("scale", {}).get("type") == "log"]
            for scale in scales:
                yield from scale.get("domain", [])
            for mark, use in uses if scales else []:
                rows = spec["datasets"].get((mark["data"] or {}).get("name"), [])
                ends = [use, mark["encoding"].get(f"{channel}2", {})]
                yield from (row[end["field"]] for end in ends for row in rows if end.get("field") in row)


def _subtitle(spec):
    lines = spec["title"].get("subtitle", [])
    return lines if isinstance(lines, str) else " ".join(lines)


def _drawn(points):
    @framed("Made")
    def chart(rows):
        base = alt.Chart(rows).encode(y=alt.Y("case:N"))
        axis = {"title": "Time (ms)", "scale": alt.Scale(type="log", domain=[float(rows["low"].min()) / 2, 99.0])}
        marks = with_interval(base, "x", ("ms", "low", "high"), axis, tooltip=tooltips("case", "ms"))
        return alt.layer(*marks), "As it was."

    return chart(pd.DataFrame(points, columns=["case", "low", "ms", "high"])).to_dict()


@pytest.mark.parametrize(("bad", "said"), [*zip(BAD, ["0", "-1", "inf"], strict=True), (math.nan, "no number")])
def test_what_a_logarithmic_axis_cannot_show_is_left_out_and_named(bad, said):
    spec = _drawn([("fine", 1.0, 2.0, 3.0), ("<bad>", bad, bad, bad), ("too", 4.0, 5.0, 6.0)])
    assert _subtitle(spec) == f"As it was. Left out of the logarithmic axis: <bad> ({said})."
    shown = [value for value in _on_log_axes(spec) if value is not None]
    assert all(value > 0 for value in shown) and {1.0, 2.0, 3.0, 4.0, 5.0, 6.0} <= set(shown)


def test_an_interval_that_begins_at_zero_is_drawn_from_the_axis_on():
    spec = _drawn([("fine", 1.0, 2.0, 3.0), ("open", 0.0, 2.0, 4.0)])
    (rows,) = spec["datasets"].values()
    assert _subtitle(spec) == "As it was." and rows[1]["ms"] == 2 and 0 < rows[1]["low"] < 1


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    with Store(results(tmp_path_factory.mktemp("stored"))) as store:
        return store.measurements(samples=True)


@pytest.mark.parametrize("name", CHARTS)
def test_no_chart_loses_its_axis_to_bad_values(reference, name):
    rows = reference.copy()
    places = rows.index[rows["estimate"].notna() & (rows["metric"] != "case_time")]
    for at, bad in enumerate(BAD):
        rows.loc[places[at::21], ["estimate", "low", "high", "predicted"]] = bad
    chart = CHARTS[name](rows)
    if not is_empty(chart):
        assert all(value is None or 0 < value < math.inf for value in _on_log_axes(chart.to_dict()))


def _energy(phase, low, joules, high):
    of = {"method": "rapl", "details": {"of": "package"}}
    found = [
        ended(),
        interval("energy", low, joules, high, **of),
        interval("energy_per_token", low, joules, high, **of),
    ]
    return {"name": "tiny", "phase": phase, "seq_len": 64, "batch_size": 1}, found
