"""Every chart is drawn by one function: what its marks, names, axes and colors say."""

import itertools
import math
import re

import pandas as pd
import pytest
import vl_convert

from nanolib.report.display import PAGE_VERSION, VEGALITE_VERSION
from nanolib.report.plot import plot
from nanolib.report.theme import COLOURS, is_empty, use_color_variables, variables
from tests.report.rows import points
from tests.shown import CHARTS

BAD = [0.0, -1.0, math.inf]


def _chart(log="", unit="", **columns):
    """A chart of three points."""
    given = {"series": ["fine", "<odd>", "too"], "x": [1, 2, 4], "y": [2.0, 3.0, 5.0]} | columns
    return plot(pd.DataFrame(given), "Made", log=log, unit=unit)


@pytest.mark.parametrize("bad", BAD)
def test_what_a_logarithmic_axis_cannot_show_is_left_out(bad):
    chart = _chart("y", y=[2.0, bad, 5.0])
    assert points(chart, "y") == [(2.0,), (None,), (5.0,)]


def test_an_interval_that_begins_at_zero_is_drawn_from_the_axis_on():
    chart = _chart("y", low=[1.0, 0.0, 4.0], high=[3.0, 4.0, 6.0])
    _, (low, y), _ = points(chart, "low", "y")
    domain = chart.to_dict()["layer"][-1]["encoding"]["y"]["scale"]["domain"]
    assert low == domain[0] > 0 and y == 3.0


def test_a_chart_of_nothing_but_what_cannot_be_shown_says_so():
    empty = _chart("y", y=[0.0, -1.0, 0.0]).usermeta["empty"]
    assert empty == "no value can be drawn on this axis"
    assert is_empty(plot(pd.DataFrame(), "Made", empty="why"))


def test_control_characters_of_names_are_escaped():
    text = _chart(series=["a\x1b[31m", "b\0", "c"], note=["\x07", "", ""]).to_json()
    assert "\\\\x1b[31m" in text and "\\u001b" not in text and "\\u0000" not in text
    assert "\\u0007" not in text
    assert "\\u001b" not in plot(pd.DataFrame(), "Made", empty="\x1b").to_json()


@pytest.mark.parametrize(("low", "high"), [(6.1, 7.8), (11, 19), (0.25, 0.55), (1.5, 700)])
@pytest.mark.parametrize("version", [VEGALITE_VERSION, PAGE_VERSION])
def test_a_logarithmic_axis_has_three_labels_or_more_and_a_grid_line_at_each(low, high, version):
    chart = _chart("y", y=[low, (low * high) ** 0.5, high])
    drawn = vl_convert.vegalite_to_svg(chart.to_dict(), vl_version=version)
    axis = drawn.partition('aria-label="Y-axis')[2].partition("foreground")[0]
    labels = re.findall(r"<text[^>]*>([\d,.]+)</text>", axis)
    lines = re.findall(r'<line[^>]* x2="680" y2="0"[^>]* opacity="1"', drawn)
    assert 3 <= len(labels) == len(lines), labels


def test_a_line_over_one_place_is_drawn_as_rows_and_one_series_is_named_in_the_title():
    layers = _chart("xy", unit="ms", x=[8, 8, 8]).to_dict()["layer"]
    fields = {layer["encoding"].get("y", {}).get("field") for layer in layers}
    assert fields == {"series"} and layers[0]["encoding"]["x"]["title"] == "ms"
    chart = _chart(series=["one"] * 3)
    assert chart.title.text == "Made: one" and points(chart, "text") == [(" ",)] * 3


def test_names_at_the_ends_of_lines_do_not_cover_each_other():
    ends = {"x": [1] * 6 + [2] * 6, "y": [0.0, 0.01, 0.02, 0.03, 5.0, 5.01] * 2}
    chart = _chart(series=[*"abcdef"] * 2, **ends)
    low, high = chart.to_dict()["layer"][-1]["encoding"]["y"]["scale"]["domain"]
    at = sorted((end - low) * 260 / (high - low) for end, x in points(chart, "end", "x") if x == 2)
    assert min(b - a for a, b in itertools.pairwise(at)) > 13
    assert at[0] > 6  # and not the axis


def test_bars_of_each_panel_have_one_axis_as_long_as_the_longest_bar():
    parts = {"series": ["a", "a", "b"] * 2, "x": [1.0, 2.0, 4.0] * 2, "part": ["p", "q", "p"] * 2}
    spec = plot(pd.DataFrame(parts | {"panel": list("kkklll")}), "Made", "bars").to_dict()
    axes = [panel["layer"][0]["encoding"]["x"]["scale"]["domain"] for panel in spec["vconcat"]]
    assert axes == [[0, pytest.approx(4.24)]] * 2


def test_what_is_not_to_be_relied_on_is_hollow_and_what_is_predicted_dashed():
    layers = _chart(sure=[True, False, True], pred=[1.0, 2.0, 3.0]).to_dict()["layer"]
    (fill,) = [one["encoding"]["fill"] for one in layers if one["mark"]["type"] == "point"]
    assert fill["condition"]["test"] == "datum.sure" and fill["value"] == COLOURS["paper"]
    dashed = [one["encoding"]["y"]["field"] for one in layers if "strokeDash" in one["mark"]]
    assert dashed == ["pred"]


def test_a_chart_may_have_more_points_than_altair_accepts_by_default():
    count = 5001
    drawn = _chart(x=range(1, count + 1), y=[1.0] * count, series=["one"] * count)
    assert len(points(drawn, "x")) >= count


def test_points_of_two_runs_are_not_joined():
    layers = _chart(series=["one"] * 3, link_run=["a", "a", "b"]).to_dict()["layer"]
    (apart,) = [one["encoding"]["detail"] for one in layers if one["mark"]["type"] == "line"]
    assert [detail["field"] for detail in apart] == ["series", "link_run"]


def test_a_page_takes_its_colors_from_its_style(stored):
    text = use_color_variables(CHARTS["attention_latency"](stored).to_json())
    assert "var(--c1)" in text and not any(color in text for color in COLOURS.values())
    assert all(f"--{name}:" in variables() for name in COLOURS)


@pytest.fixture(scope="module")
def spoiled(stored):
    """The stored rows, one in seven of which has a bad value."""
    rows = stored.copy()
    places = rows.index[rows["estimate"].notna() & (rows["metric"] != "case_duration")]
    for at, bad in enumerate(BAD):
        rows.loc[places[at::21], ["estimate", "low", "high", "predicted"]] = bad
    return rows


@pytest.mark.parametrize("name", CHARTS)
def test_no_chart_loses_its_axis_to_bad_values(spoiled, name):
    chart = CHARTS[name](spoiled)
    if is_empty(chart):
        return
    spec = vl_convert.vegalite_to_vega(chart.to_dict(), vl_version=PAGE_VERSION)
    scales = [scale for part in [spec, *spec.get("marks", [])] for scale in part.get("scales", [])]
    ends = [
        end for scale in scales if scale["type"] in ("log", "linear") for end in scale["domain"]
    ]
    assert ends and all(math.isfinite(end) for end in ends if isinstance(end, int | float))
    assert all(end > 0 for scale in scales if scale["type"] == "log" for end in scale["domain"])
