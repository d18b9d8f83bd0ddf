"""However many series a chart has, no two look alike: on paper, and in its legend."""

import re
import shutil

import numpy as np
import pandas as pd
import pytest
import vl_convert

from nanolib.paths import checkout
from nanolib.report import renderer
from nanolib.report.drawing import colour_and_shape
from nanolib.report.palette import PALETTE
from nanolib.store import Store
from tests.shown import CHARTS

_REFERENCE = checkout() / "outputs" / "reference" / "amd-epyc-2-cores-quick" / "results.sqlite"
_NAMES, _LISTS = ("name", "pattern", "variant", "arm"), ("forms", "prefill_forms")
_EXPERIMENTS = ("attention", "model", "energy", "fp8", "distributed")
_TIMES = 9
_DRAWN = ("attention_latency", "attention_roofline", "model_performance", "fp8_losses", "decode_scaling")


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
