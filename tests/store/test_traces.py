"""Traces come back, are deleted with their run, and lose at most the last second at a kill."""

import subprocess
import sys

import pytest

from nanolib.measurement import BadInput
from nanolib.store import Store, traces
from nanolib.store.schema import TRACE_TABLES
from tests.store.rows import make_run


@pytest.fixture(autouse=True)
def _run_in_flight(store):
    store.add(make_run("a", rows={}))


def _recorded(store, count):
    """Record a trace with rows in each table, and as many rows of layers as `count` says."""
    with traces.recording(lambda: store.new_trace("a", "c")):
        trace = traces.current()
        block, op = trace.name("blocks.0"), trace.name("qk")
        trace.put("layers", ((call, block, 1000 + call) for call in range(count)))
        trace.put("ops", [(0, block, op, 7)])
        trace.put("statistics", [(0, block, trace.name("sd"), 0.5)])
        trace.put("tokens", [(5, 6)])
        trace.put("sections", [(trace.name("decode"), 1, 2)])
        trace.put("power_samples", [(trace.name("rapl"), 3, 100.0, None, None, None)])


def test_rows_come_back_as_put_with_names_for_indices(store):
    _recorded(store, 2500)
    layers = store.trace("layers", ["a"])
    assert list(layers.columns) == ["run_id", "case_id", "call", "layer", "ns"]
    assert list(layers.ns) == list(range(1000, 3500)) and set(layers.layer) == {"blocks.0"}
    for table, columns, row in (
        ("ops", ["layer", "op", "ns"], ["blocks.0", "qk", 7]),
        ("statistics", ["statistic", "value"], ["sd", 0.5]),
        ("power_samples", ["source", "watts"], ["rapl", 100.0]),
    ):
        assert store.trace(table)[columns].to_numpy().tolist() == [row]


def test_a_case_that_records_nothing_has_no_trace(store):
    with traces.recording(lambda: store.new_trace("a", "c")):
        pass
    assert store.connection.execute("SELECT count(*) FROM traces").fetchone()[0] == 0
    traces.current().put("layers", [(0, 0, 1)])  # rows outside a case are discarded
    assert store.trace("layers").empty


def test_deleting_a_run_deletes_its_traces_and_the_file_shrinks(store):
    for count in (30, 50_000):  # the second attempt replaces the first one
        _recorded(store, count)
    store.add(make_run("b"))
    store.update_run("a", status="done", started="2020-01-01T00:00:00.000000Z")
    store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = store.path.stat().st_size
    assert len(store.trace("layers")) == 50_000
    assert store.cleanup_old_runs(max_age_days=30) == ["a"]
    assert all(store.trace(table).empty for table in TRACE_TABLES)
    assert store.path.stat().st_size < before - 500_000


def test_rows_that_cannot_be_written_are_told_and_later_ones_are_written(store):
    trace = store.new_trace("a", "c")
    trace.put("layers", [("too", "many", "columns", "here")])
    with pytest.raises(BadInput, match=r"traces: some rows of .* could not be written"):
        store.commit_transaction()
    trace.put("layers", [(0, trace.name("x"), 1)])
    store.commit_transaction()
    assert len(store.trace("layers")) == 1


_RECORDING = """
import sys, time
from nanolib.store import Store
store = Store(sys.argv[1])
trace = store.new_trace("a", "c")
for at in range(10_000):
    trace.put("tokens", [(trace.at_us(time.monotonic()), 1)])
    print(trace.at_us(time.monotonic()), flush=True)
    time.sleep(0.005)
"""


def test_a_killed_process_loses_at_most_the_last_second(store):
    command = [sys.executable, "-c", _RECORDING, str(store.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    last = 0
    while last < 2_500_000:
        last = int(process.stdout.readline())
    process.kill()
    process.wait()
    with Store(store.path) as again:
        assert again.connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        # Commits are half a second apart, and later on a busy machine.
        assert last - again.trace("tokens").at_us.max() < 2_000_000
