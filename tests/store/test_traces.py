"""Traces are stored with their case and go with it."""

import pytest

from nanolib.store.schema import TRACE_TABLES
from tests.store.rows import make_run

ROWS = {
    "power_samples": [("rapl", 3, 100.0, None, None, None)],
    "sections": [("decode", 1, 2)],
    "tokens": [(5, 6)],
    "layers": [(call, "blocks.0", 1000 + call) for call in range(50_000)],
    "statistics": [(0, "blocks.0", "sd", 0.5)],
    "ops": [(0, "blocks.0", "qk", 7)],
}


def _stored(store, table):
    rows = store.connection.execute(f"SELECT * FROM {table} ORDER BY id").fetchall()
    return [row[3:] for row in rows]


@pytest.fixture
def traced(store):
    """A run that has stored a case twice, and the second time with fewer rows."""
    store.add(make_run("a", rows={}))
    for rows in ({table: 2 * rows for table, rows in ROWS.items()}, ROWS):
        store.write_case("a", "c", {}, [], rows)
    store.write_case("a", "d", {}, [], {"tokens": [(7, 8)]})
    return store


def test_rows_come_back_as_given_and_a_second_attempt_replaces_them(traced):
    assert set(ROWS) == set(TRACE_TABLES)
    for table, rows in ROWS.items():
        assert _stored(traced, table) == rows + [(7, 8)] * (table == "tokens")


def test_deleting_a_run_deletes_its_traces_and_the_file_shrinks(traced):
    traced.add(make_run("b"))
    traced.update_run("a", status="done", started="2020-01-01T00:00:00.000000Z")
    traced.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    before = traced.path.stat().st_size
    assert traced.cleanup_old_runs(max_age_days=30) == ["a"]
    assert not any(_stored(traced, table) for table in TRACE_TABLES)
    assert traced.path.stat().st_size < before - 500_000
