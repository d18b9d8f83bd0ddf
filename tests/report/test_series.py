"""However many series a chart has, no two look alike: on paper, and in its legend."""

import itertools
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import vl_convert

from nanolib.compare.history import Change, History
from nanolib.paths import checkout
from nanolib.report import renderer
from nanolib.report.drawing import colour_and_shape
from nanolib.report.palette import PALETTE, SERIES
from nanolib.report.regressions import history_chart
from nanolib.store import Store
from tests.report.rows import ATTENTION
from tests.shown import CHARTS

_REFERENCE = checkout() / "outputs" / "reference" / "amd-epyc-2-cores-quick" / "results.sqlite"
_NAMES, _LISTS = ("name", "pattern", "variant", "arm"), ("forms", "prefill_forms")
_EXPERIMENTS = ("attention", "model", "energy", "fp8", "distributed")
_TIMES = 9
_DRAWN = [
    *("attention_latency", "attention_speed_up", "attention_quality", "attention_roofline"),
    *("model_performance", "model_loss", "activation_profile", "fp8_numerics", "fp8_losses", "fp8_parity"),
    *("decode_scaling", "prefill_times", "sharded_memory"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A quick run in which each model, kind, pattern, cast, arm and algorithm is there several times, each under its own name."""
    path = tmp_path_factory.mktemp("series") / "results.sqlite"
    shutil.copy(_REFERENCE, path)
    with Store(path) as store:
        measured = store.measurements(samples=True)
    measured = measured[measured["experiment"].isin(_EXPERIMENTS)]
    return pd.concat([_named(measured, at) for at in range(_TIMES)], ignore_index=True)


def _named(rows, at):
    rows = rows.assign(case_id=rows["case_id"] + str(at), time=at)
    for name in _NAMES:
        values = rows[f"factor.{name}"]
        rows[f"factor.{name}"] = [one if pd.isna(one) else f"{one.split(' with ')[0]} {at}" for one in values]
    for name in _LISTS:
        values = rows[f"factor.{name}"]
        rows[f"factor.{name}"] = [[f"{one}{at}" for one in many] if isinstance(many, list) else many for many in values]
    across = rows["experiment"] == "distributed"
    rows.loc[across, "scope"] = rows.loc[across, "scope"].str.replace(r"^(\w+)", rf"\g<1>{at}", regex=True)
    return rows


def _legends(chart):
    """Of each legend the names, each with its mark: the outline, what fills it and its stroke."""
    drawn = vl_convert.vega_to_svg(renderer.vega_spec(chart))
    for legend in drawn.split('role-legend"')[1:]:
        marks = re.findall(r'role-legend-symbol.*?<path .*?d="(.*?)"(.*?)/>', legend)
        names = re.findall(r"role-legend-label.*?<text.*?>(.*?)</text>", legend)
        assert len(marks) == len(names)
        looks = [(outline, *re.findall(r'(?:fill|stroke)="(.*?)"', rest)) for outline, rest in marks]
        yield dict(zip(names, looks, strict=True))


@pytest.mark.parametrize("name", _DRAWN)
def test_no_two_series_of_a_chart_look_alike(rows, name):
    chart = CHARTS[name](rows[rows["time"] < 2] if name == "attention_roofline" else rows)  # shapes are taken there
    looks = max(_legends(chart), key=len)
    assert len(looks) >= _TIMES and len(set(looks.values())) == len(looks)


def test_ninety_eight_names_have_a_colour_and_a_shape_each_that_no_other_has():
    assert len(set(_looks(98))) == 98 and [colour for colour, _ in _looks(7)] == PALETTE


def test_colours_differ_and_those_of_one_shape_in_lightness_or_hue_too():
    shapes = [shape for _, shape in _looks(len(SERIES))]
    assert [colour for colour, _ in _looks(len(SERIES))] == SERIES
    apart = {pair: _apart(*pair) for pair in itertools.combinations(SERIES, 2)}
    assert min(apart.values()) > 0.09
    alike = [
        (one, other) for (one, a), (other, b) in itertools.combinations(zip(SERIES, shapes, strict=True), 2) if a == b
    ]
    assert len(alike) == 7 and min(apart[pair] for pair in alike) > 0.18


def _looks(count):
    """The colour and the shape of each of so many names."""
    channels = colour_and_shape("name", "Name", pd.Series([f"kind {at}" for at in range(count)]))
    return list(zip(*(channel.to_dict()["scale"]["range"] for channel in channels), strict=True))


def _apart(*colours):
    """Distance in Oklab (Ottosson, 2020)."""
    one, other = map(_oklab, colours)
    return float(np.linalg.norm(one - other))


def _oklab(colour):
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.63]])
    opponents = np.array([[0.2105, 0.7936, -0.0041], [1.978, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return opponents @ np.cbrt(cones @ linear)


def test_each_case_that_changed_has_a_colour_of_its_own_and_those_beyond_are_not_said_to_be_flat():
    values = pd.DataFrame(
        {"estimate": [1.0, 2.0], "low": [0.9, 1.9], "high": [1.1, 2.1], "git_revision": "r", "started": "2026"}
    )
    change = Change(1, 2.0, True, "a", "b")
    found = [
        History(
            "m1",
            "model",
            f"decoder_tiny with num_layers 2, vocab_size 4096 inference seq_len={at}",
            "latency",
            "decode",
            values,
            (change,) if at < 16 else (),
        )
        for at in range(17)
    ]
    looks = max(_legends(history_chart(found)), key=len)
    assert list(looks)[-2:] == ["others that changed", "no change of level"] and len(looks) == len(SERIES) + 2
    assert len(set(looks.values())) == len(looks)


def test_a_case_that_failed_stands_at_the_bottom_however_high_a_page_draws_the_chart(measured):
    panels = CHARTS["attention_latency"](measured("attention", list(ATTENTION.values()))).to_dict()["hconcat"]
    crosses = [layer for panel in panels for layer in panel["layer"] if layer["mark"].get("text") == "✕"]
    assert len(crosses) == 2 and all(layer["encoding"]["y"] == {"value": "height"} for layer in crosses)
