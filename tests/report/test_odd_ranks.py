"""Runs across ranks that are unlike the notebook's own: two dtypes, an idle rank, a busy machine."""

import pytest

from nanolib.experiments.distributed.tables import component_table
from nanolib.experiments.distributed.view import SECTION
from nanolib.measurement import Flag, Status, exact
from tests.report.cases import COMPUTING, decode_case, timed
from tests.report.rows import ended, interval
from tests.shown import CHARTS

FUSED = {"fused": ((8, 9, 9.5), COMPUTING)}
DTYPES = ("float32", "bfloat16")


def _drawn(chart, rows, column="series"):
    data = CHARTS[chart](rows).to_dict()["datasets"].values()
    return [line for lines in data for line in lines if column in line]


def _part(algorithm, dtype="float32"):
    part = interval("component_time", 27, 28.75, 30, scope=f"{algorithm}: comp_attention")
    shape = {"seq_len": 1024, "dtype": dtype, "world_size": 2, "nodes": 1}
    return shape | {"algorithms": [algorithm]}, [timed(algorithm, 27, 28.75, 30), part]


def test_tables_and_charts_tell_two_dtypes_apart(measured):
    rows = measured("distributed", [_part("fused", dtype) for dtype in DTYPES])
    tables = {title: table.readable(rows) for title, table in SECTION.tables.items()}
    for title in ("Decoding", "Components of a call"):
        assert set(tables[title]["Ranks, dtype"]) == {f"2, {dtype}" for dtype in DTYPES}
    bars = _drawn("decode_shares", rows, "part")
    assert {(bar["panel"], bar["text"]) for bar in bars} == {
        (f"fused, {dtype}", "28.8 ms") for dtype in DTYPES
    }
    assert {bar["link_n"] for bar in bars} == {1024}


def test_memory_of_two_dtypes_is_drawn_as_two_lines(measured):
    def peaks(*dtypes):
        cases = []
        for dtype in dtypes:
            shape = {"seq_len": 64, "dtype": dtype, "world_size": 2}
            cases.append((shape, [exact("peak_memory", 8.0, scope="ring forward", predicted=8.0)]))
        return {row["series"] for row in _drawn("sharded_memory", measured("distributed", cases))}

    assert peaks(*DTYPES) == {f"ring, 2 ranks, {dtype}" for dtype in DTYPES}
    assert peaks("float32") == {"ring, 2 ranks"}


@pytest.mark.parametrize(("algorithm", "ranks"), [("dense", "1, float32"), ("ring", "2, float32")])
def test_the_baseline_has_one_rank(measured, algorithm, ranks):
    (line,) = component_table(measured("distributed", [_part(algorithm)])).to_dict("records")
    assert line["shape"] == ranks
    shape = {"seq_len": 1024, "dtype": "float32", "world_size": 2, "nodes": 1}
    case = shape | {"prefill_algorithms": [algorithm]}, [timed(f"{algorithm} forward", 1, 2, 3)]
    rows = measured("distributed", [case])
    assert list(SECTION.tables["Whole sequences"].readable(rows)["Ranks, dtype"]) == [ranks]


def test_timings_of_a_busy_machine_are_hollow(measured):
    for flags, sure in (((), True), ((Flag.BUSY_MACHINE,), False)):
        rows = measured("distributed", [decode_case(FUSED, flags=flags)])
        assert [point["sure"] for point in _drawn("decode_scaling", rows)] == [sure]


def test_without_a_result_across_ranks_the_conclusion_has_the_reason(say):
    shape = decode_case(FUSED)[0]
    (line,) = say("distributed", [(shape, [ended(Status.ERROR, "no port")])])
    assert line.endswith("was not measured: no case has a result (1 error: no port).")
