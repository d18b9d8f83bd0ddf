"""What is said and drawn of who holds a model's memory, and of batches."""

from hypothesis import given
from hypothesis import strategies as st

from nanolib.experiments.model.view.batches import BEATEN, FRONT, generation_batches
from nanolib.measurement import Measurement, exact
from tests.report.cases import inference, model_case, timed
from tests.report.rows import ended

PARTS = [
    ["weights", "a", "", "", 2**20],
    ["saved activations", "b.*", "aten::mm", "mine:7", 3 * 2**20],
]


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
    assert "batch 16 is beaten in both by another" in next(
        line for line in say("model", worse) if "generating" in line
    )


_times = st.tuples(*[st.integers(1, 60)] * 3).map(sorted)


@given(st.dictionaries(st.sampled_from((1, 2, 3, 4, 8, 16)), _times, min_size=2))
def test_no_point_of_the_front_is_beaten_with_confidence_on_both_axes(batches):
    import pandas as pd

    from nanolib.experiments.model.view.batches import _SERIES, _rated

    group = pd.DataFrame(
        [
            {name: "x" for name in _SERIES}
            | {
                "batch_size": batch,
                "decode": ms,
                "decode_low": low,
                "decode_high": high,
                "decode_row": 1,
            }
            | {"decode_memory": 1.0, "decode_memory_predicted": 1.0}
            for batch, (low, ms, high) in sorted(batches.items())
        ]
    )
    lines = _rated(group).to_dict("records")
    for line in lines:
        beaten = [
            o
            for o in lines
            if o["user_low"] > line["user_high"] and o["total_low"] > line["total_high"]
        ]
        assert bool(beaten) == (line["front"] == BEATEN)
        if line["front"] == FRONT:
            for other in lines:
                assert (
                    other is line
                    or line["user_low"] > other["user_high"]
                    or line["total_low"] > other["total_high"]
                )
    assert any(line["front"] != BEATEN for line in lines)


def test_a_beaten_batch_is_drawn_hollow(measured):
    cases = [generation(1, 1.9, 2, 2.1), generation(4, 15, 16, 17), generation(16, 20, 21, 22)]
    rows = measured("model", [(factors, [ended(), *found]) for factors, found in cases])
    spec = generation_batches(rows).to_dict()
    points = [
        row for data in spec["datasets"].values() for row in data if row.get("panel") == "all users"
    ]
    assert {row["x"]: row["sure"] for row in points} == {1: True, 4: False, 16: True}
