"""What charts and tables say beside their marks: the model, the link, the limits, the order in which things were measured."""

import pandas as pd
import pytest

from nanolib.compare.history import _changes
from nanolib.experiments.attention.view.quality import quality_words
from nanolib.experiments.distributed.view import prefill_table, training_table
from nanolib.experiments.distributed.view.decode import _link_words
from nanolib.experiments.energy.view import layers
from nanolib.experiments.fp8.view.parity import parity_table, parity_words
from nanolib.measurement import Flag, Measurement, Provenance, Status, exact
from nanolib.report.overview import schema_of
from nanolib.report.roofline import roofline_table
from tests.report.rows import SIZES, ceilings_of, ended, interval, rates_of


def _link(ranks, us, gb_per_s, residual):
    rows = [Measurement("link_latency", us / 1e3, n=5, scope="gloo", details={"largest_residual": residual})]
    if gb_per_s:
        rows.append(Measurement("link_bandwidth", gb_per_s * 1e9, n=5, scope="gloo"))
    return {"world_size": ranks, "forms": ["fused"]}, rows


def test_the_fit_of_the_most_ranks_is_said_with_what_it_misses(measured):
    rows = measured("distributed", [_link(2, 20, 4, 0.1), _link(4, 50, 2.5, 0.24)])
    said = "Dashed: the model, 50 µs per message, then 2.50 GB/s (gloo); off by up to 24%."
    assert _link_words(rows) == said


def test_a_link_too_quick_for_its_bytes_has_no_rate(measured):
    assert _link_words(measured("distributed", [_link(2, 20, 0, 0.1)])) == (
        "Dashed: the model, 20 µs per message (gloo); off by up to 10%."
    )


def test_ranks_that_sent_nothing_have_no_link(measured):
    assert _link_words(measured("distributed", [({"forms": ["fused"]}, [ended()])])) == ""


def test_training_that_gave_no_time_stands_with_its_strategies_and_why(measured):
    factors = {"name": "tiny", "world_size": 2, "strategies": ["ddp", "fsdp"], "seq_len": 8, "batch_size": 1}
    table = training_table(measured("distributed", [(factors, [ended(Status.TIMEOUT, "a rank hung")])]))
    (line,) = table.to_dict("records")
    assert (line["name"], line["strategy"], line["status"], line["message"]) == (
        "tiny", "ddp, fsdp", "timeout", "a rank hung",
    )  # fmt: skip


@pytest.mark.parametrize(("names", "said"), [(["tiny"], ": tiny"), (["tiny", "large"], "")])
def test_one_model_alone_is_named_in_the_title(measured, names, said):
    rows = measured("energy", [({"name": name, "phase": "decode"}, [ended()]) for name in names])
    assert layers._of_model(rows) == said


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


def test_the_schema_names_the_columns_without_factors_and_samples(measured):
    rows = measured("model", [(SIZES | {"name": "tiny"}, [ended()])])
    names = schema_of(rows).removeprefix("measurements: ").replace("\n", " ").split(", ")
    assert names == [name for name in rows.columns if "." not in name and name != "samples"]


@pytest.mark.parametrize(("provenance", "said"), [(Provenance.MEASURED, ""), (Provenance.EMULATED, " (emulated)")])
def test_parity_is_called_emulated_where_it_is(measured, provenance, said):
    details = {"verdict": "equivalent", "control": False, "margin_nats": 0.0025, "tenths": None}
    row = Measurement("parity", 0.0, -1e-3, 1e-3, 0.95, 3, scope="a", details=details, provenance=provenance)
    table = parity_table(measured("fp8", [({"arm": "fp8_rowwise", "seeds": 3, "steps": 900}, [ended(), row])]))
    assert str(parity_words(table)[0]).startswith(f"fp8 rowwise{said}: equivalent after 900 steps")


def test_a_rate_without_a_type_has_no_roof(measured):
    assert roofline_table(measured("model", [({"name": "tiny"}, [ended(), *rates_of("x", 1e6, 1e3, 1e9)])])).empty


def test_patterns_are_told_in_the_order_in_which_they_were_measured(measured):
    cases = [
        (SIZES | {"name": pattern, "pattern": pattern, "target": 0.5, "seeds": 2}, [
            ended(),
            exact("sparsity", 0.5, method="mask"),
            Measurement("loss", 2.0, 1.9, 2.1, 0.95, 5, scope="dense"),
            Measurement("loss_difference", 0.2, 0.1, 0.3, 0.95, 5, scope="replaced"),
            Measurement("loss_difference", 0.1, 0.0, 0.2, 0.95, 5, scope="fine_tuned"),
        ])
        for pattern in ("window", "block", "random")
    ]  # fmt: skip
    lines = quality_words(measured("attention", cases))
    assert [line.answer.split()[4].strip(",") for line in lines] == ["window", "block", "random"]


def test_modes_and_types_are_told_in_the_order_in_which_they_were_measured(say):
    cases = []
    for mode in ("training_step", "forward"):
        for precision, ms in (("bfloat16", 8.0), ("fp8_rowwise", 4.0)):
            factors = {"preset": "p", "name": "a", "mode": mode, "precision": precision, "compiled": False}
            row = interval("latency", ms * 0.9, ms, ms * 1.1, scope=mode, details={"parameters": 9})
            cases.append((SIZES | factors, [row]))
    assert [line.split(":")[0] for line in say("fp8", cases)] == ["training step", "forward"]
    cases = [
        (
            SIZES | {"name": name, "causal": True, "options": {}, "dtype": dtype},
            [interval("latency", *ends, scope="forward")],
        )
        for dtype in ("float32", "bfloat16")
        for name, ends in (("dense", (1, 2, 3)), ("dense (math)", (7, 8, 9)))
    ]
    told = [line.split(":")[0] for line in say("attention", cases) if "fastest" in line]
    assert told == ["Causal, batch 3, float32", "Causal, batch 3, bfloat16"]


def test_a_length_that_one_rank_alone_decoded_does_not_silence_the_next(say):
    def case(ranks, seq_len):
        factors = {"world_size": ranks, "seq_len": seq_len, "dtype": "float32", "forms": ["fused"], "batch_size": 1}
        return factors, [interval("latency", 1.0, 2.0, 3.0, scope="fused")]

    lines = say("distributed", [case(1, 64), case(1, 128), case(2, 128)])
    assert (
        lines[0].startswith("Decoding over 64 keys, float32: only one rank") and "fused was measured alone" in lines[1]
    )


def test_an_arm_that_ran_out_of_memory_has_no_verdict(measured):
    rows = measured("fp8", [({"arm": "fp8_rowwise", "seeds": 3, "steps": 9}, [ended(Status.UNSUPPORTED, "no FP8")])])
    assert parity_words(parity_table(rows)) == []


def test_prefill_that_gave_no_time_stands_with_its_algorithms_and_why(measured):
    factors = SIZES | {"world_size": 2, "prefill_forms": ["ring", "zigzag"]}
    (line,) = prefill_table(measured("distributed", [(factors, [ended(Status.TIMEOUT, "a rank hung")])])).to_dict(
        "records"
    )
    assert (line["form"], line["direction"], line["message"]) == ("ring, zigzag", "", "a rank hung")


def test_a_link_of_more_ranks_than_cores_is_not_the_one_that_is_told(measured):
    factors, found = _link(4, 50, 2.5, 0.24)
    flagged = [Measurement.from_dict(row.to_dict() | {"flags": [Flag.OVERSUBSCRIBED]}) for row in found]
    said = _link_words(measured("distributed", [_link(2, 20, 4, 0.1), (factors, flagged)]))
    assert said.startswith("Dashed: the model, 20 µs per message, then 4.00 GB/s")


def test_the_roofline_is_of_all_experiments_unless_one_is_named(measured):
    case = (SIZES | {"name": "tiny"}, [ended(), *rates_of("forward", 1e6, 1e3, 1e9)])
    rows = measured("model", [*ceilings_of().values(), case])
    assert len(roofline_table(rows)) == len(roofline_table(rows, "model")) == 1 and roofline_table(rows, "fp8").empty


def test_a_history_that_holds_a_zero_has_no_ratio():
    points = pd.DataFrame(
        {"estimate": [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0], "low": 0.0, "high": 1.0, "git_revision": "a"}
    )
    assert _changes(points, "latency") == ()
