"""What is said and drawn of who holds a model's memory, and of batches."""

import re

import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from nanolib.experiments.model import view
from nanolib.experiments.model.view.batches import BEATEN, FRONT, generation_batches
from nanolib.experiments.model.view.charts import CHARTS
from nanolib.measurement import Measurement, exact
from nanolib.report.palette import PALETTE, PAPER
from nanolib.report.renderer import vega_spec
from tests.report.cases import MODEL, inference, model_case, timed, training
from tests.report.rows import ceilings_of, ended

PARTS = [["weights", "a", "", "", 2**20], ["saved activations", "b.*", "aten::mm", "mine:7", 3 * 2**20]]


def peak(details, **more):
    shape = {name: more.pop(name) for name in ("name", "seq_len") if name in more}
    row = exact("peak_memory", 4.0, scope="training_step", predicted=4.0, details=details, **more)
    return model_case("training", [row], **shape)


KNOWN = {"parts": PARTS, "phases": {}}


def _held(lines):
    return next(line for line in lines if "hold " in line)


def test_a_peak_is_told_with_who_holds_it(say):
    assert _held(say("model", [inference(), peak(KNOWN)])) == (
        "tiny (dense, float32), batch 3, n = 64: at the peak of a training step, 4 MiB, saved activations hold 75%: "
        "counted to the byte; weights 25%; as planned."
    )


def test_a_plan_that_was_off_is_said(say):
    off = (
        MODEL | {"name": "tiny", "mode": "training"},
        [exact("peak_memory", 4.0, scope="training_step", predicted=5.0, details=KNOWN)],
    )
    assert "20.0% below the plan" in _held(say("model", [inference(), off]))


HOSTILE = [
    {},
    {"parts": [["weights", "a", "", "", "much"]]},
    {"parts": [["weights", "a", "", "", -3]]},
    {"parts": [["weights", "a", "", "", 2**60]]},
    {"parts": [["weights", 7, "", "", 1]]},
    {"parts": [["weights", "a"]]},
    {"parts": []},
    {"parts": "all"},
]


@pytest.mark.parametrize("details", HOSTILE)
def test_rows_that_do_not_tell_their_holders_are_left_out(measured, details):
    factors, rows = peak(details)
    found = measured("model", [(factors, [ended(), *rows])])
    assert view.holders_table(found).empty


def test_the_table_names_the_line(measured):
    found = measured(
        "model", [[factors, [ended(), *rows]] for factors, rows in (peak(KNOWN), peak(KNOWN, name="other"))]
    )
    table = view.holders_table(found)
    assert list(table["by"])[:2] == ["mine:7", "—"] and list(table["share"])[:2] == ["75%", "25%"]


def generation(batch, low, ms, high, **shape):
    rows = [
        timed("prefill", 1, 2, 3),
        timed("decode", low, ms, high),
        exact("peak_memory", 2.0, scope="decode", predicted=2.5),
    ]
    rows.append(Measurement("tokens_per_second", 1e3 * batch / ms, scope="decode"))
    return model_case("generation", rows, batch_size=batch, **shape)


def test_the_knee_is_where_more_batch_brings_less_than_half(say):
    grows = [inference(), generation(1, 1.9, 2, 2.1), generation(4, 1.9, 2, 2.1)]
    line = next(line for line in say("model", grows) if "generating after" in line)
    assert (
        "no knee up to batch 4: more still pays: from batch 1 to 4 one user gets 500 → 500 tokens/s and all get 500 → 2,000"
        in line
    )
    assert "whether batch 1 is beaten cannot be told" in line
    flat = [*grows, generation(16, 7.9, 8, 8.1)]
    line = next(line for line in say("model", flat) if "generating after" in line)
    assert "more than batch 4 hardly pays: 16 gives 1.00× the tokens/s for 4× the batch" in line
    open_ = [*grows, generation(16, 2, 4, 9)]
    line = next(line for line in say("model", open_) if "generating after" in line)
    assert "up to batch 4 more pays; whether batch 16 pays cannot be told" in line
    worse = [*grows, generation(16, 20, 21, 22)]
    assert "batch 16 is beaten in both by another" in next(line for line in say("model", worse) if "generating" in line)


def test_a_slow_batch_between_two_is_no_knee_and_small_factors_have_digits(say):
    first, slow, last = generation(1, 1.9, 2, 2.1), generation(2, 1900, 2000, 2100), generation(4, 1.9, 2, 2.1)
    line = next(line for line in say("model", [inference(), first, slow, last]) if "generating after" in line)
    assert "no knee up to batch 4: more still pays" in line and "batch 2 is beaten in both by another" in line
    line = next(line for line in say("model", [inference(), first, slow]) if "generating after" in line)
    assert "more than batch 1 hardly pays: 2 gives 0.00200× the tokens/s for 2× the batch" in line


def test_a_beaten_batch_is_drawn_hollow(measured):
    cases = [generation(1, 1.9, 2, 2.1), generation(4, 15, 16, 17), generation(16, 20, 21, 22)]
    rows = measured("model", [(factors, [ended(), *found]) for factors, found in cases])
    drawn = vl_convert.vega_to_svg(vega_spec(generation_batches(rows)))
    points = re.findall(r'aria-roledescription="point".*?/>', drawn)
    assert len(points) == 3 and all(f'stroke="{PALETTE[0]}"' in point for point in points)
    assert [f'fill="{PAPER}"' in point for point in points] == [False, True, False]


def test_what_tells_series_apart_stands_before_a_long_name(measured):
    long = "decoder with num_layers 2, vocab_size 4096"
    cases = [generation(batch, 1, 2, 3, name=long, seq_len=n) for batch in (1, 4) for n in (64, 128)]
    step = [training([(9, 10, 11)] * 3, name=name) for name in (long, "tiny")]
    found = measured(
        "model", [*ceilings_of().values(), *((factors, [ended(), *rows]) for factors, rows in cases + step)]
    )
    drawn = {name: vl_convert.vega_to_svg(vega_spec(CHARTS[name](found))) for name in CHARTS}
    assert all(f">batch {batch}, decoder with num_layers" in drawn["model_generation"] for batch in (1, 4))
    assert all(f">n = {n}, decoder with num_layers" in drawn["generation_batches"] for n in (64, 128))
    assert ">n = 64, decoder with" in drawn["training_phases"] and ">n = 64, tiny" in drawn["training_phases"]


def test_one_batch_is_no_front(measured, say):
    assert not [line for line in say("model", [inference(), generation(1, 1.9, 2, 2.1)]) if "generating" in line]
    factors, rows = generation(1, 1.9, 2, 2.1)
    assert view.batch_table(measured("model", [(factors, [ended(), *rows])])).empty


_times = st.tuples(*[st.integers(1, 60)] * 3).map(sorted)


@given(st.dictionaries(st.sampled_from((1, 2, 3, 4, 8, 16)), _times, min_size=2))
def test_no_point_of_the_front_is_beaten_with_confidence_on_both_axes(batches):
    import pandas as pd

    from nanolib.experiments.model.view.batches import _SERIES, _rated

    group = pd.DataFrame(
        [
            {name: "x" for name in _SERIES}
            | {"batch_size": batch, "decode": ms, "decode_low": low, "decode_high": high, "decode_row": 1}
            | {"decode_memory": 1.0, "decode_memory_predicted": 1.0}
            for batch, (low, ms, high) in sorted(batches.items())
        ]
    )
    lines = _rated(group).to_dict("records")
    for line in lines:
        beaten = [o for o in lines if o["user_low"] > line["user_high"] and o["total_low"] > line["total_high"]]
        assert bool(beaten) == (line["front"] == BEATEN)
        if line["front"] == FRONT:
            for other in lines:
                assert other is line or line["user_low"] > other["user_high"] or line["total_low"] > other["total_high"]
    assert any(line["front"] != BEATEN for line in lines)
