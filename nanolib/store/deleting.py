"""Runs that go, with all that hangs off them, and the space that they leave."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from nanolib.measurement import BadInput, RunStatus
from nanolib.store.connection import Connection, value_of
from nanolib.store.identity import gone
from nanolib.store.schema import HAS_RUN, TRACE_TABLES

_STEP_ROWS, _STEP_PAGES = 1_000_000, 20_000  # freed at once, a second or two, while others wait


def old_runs(
    database: Connection, max_age_days: float | None, max_runs: int | None, run_ids: Collection[str]
) -> list[str]:
    """The runs that may go, oldest first; arguments as in `Store.cleanup_old_runs`.

    Raises:
        BadInput: One of `run_ids` is in flight.
    """
    query = "SELECT run_id, status, process, julianday('now') - julianday(started) FROM runs ORDER BY rowid"
    runs = [
        (run_id, status == RunStatus.RUNNING and not gone(process, database.path), age)
        for run_id, status, process, age in database.connection.execute(query).fetchall()
    ]
    kept = len(runs) if max_runs is None else max_runs
    for run_id, in_flight, _ in runs:
        if run_id in run_ids and in_flight:
            raise BadInput(f"run: {run_id[:8]} is in flight; stop it first")
    return [
        run_id
        for place, (run_id, in_flight, age) in enumerate(runs)
        if not in_flight
        and (
            (max_age_days is not None and age is not None and age > max_age_days)
            or len(runs) - place > kept
            or run_id in run_ids
        )
    ]


def delete_runs(database: Connection, run_ids: Iterable[str]) -> None:
    """Delete runs; what is left of runs that are gone follows, part by part.

    All go at once, in a moment: their rows over time, which nobody sees without their run, are freed afterwards, in steps
    between which others can write. A kill leaves the rest to the next call.
    """
    db = database.connection
    db.execute("PRAGMA foreign_keys = OFF")  # deletes what hangs off a row one by one, in thrice the time
    try:
        with database.transaction():
            for run_id in run_ids:
                of_run = f"(SELECT run_id FROM runs WHERE run_id = ? AND status IS NOT '{RunStatus.RUNNING}')"
                for table in ("measurements", "runs"):
                    db.execute(f"DELETE FROM {table} WHERE run_id = {of_run}", (run_id,))
        lost = [at for (at,) in db.execute(f"SELECT trace_id FROM traces WHERE NOT {HAS_RUN} ORDER BY trace_id")]
        for table in TRACE_TABLES if lost else ():
            _free(database, table, lost)
        with database.transaction():
            db.executemany("DELETE FROM traces WHERE trace_id = ?", [(at,) for at in lost])
    finally:
        db.execute("PRAGMA foreign_keys = ON")
    _shrink(database)


def _free(database: Connection, table: str, lost: Sequence[int]) -> None:
    """Free the rows of traces whose run is gone; where they are most of the table, what stays is written anew instead."""
    db = database.connection
    last = f"SELECT trace_id, (SELECT max(number) FROM {table} t WHERE t.trace_id = traces.trace_id) FROM traces"
    counts = {at: 1 + number for at, number in db.execute(last) if isinstance(number, int)}
    gone = {at: counts[at] for at in lost if at in counts}
    if sum(gone.values()) > 4 * (sum(counts.values()) - sum(gone.values())):
        with database.transaction():
            of_run = f"SELECT trace_id FROM traces WHERE {HAS_RUN}"
            db.execute(f"CREATE TEMP TABLE kept AS SELECT * FROM {table} WHERE trace_id IN ({of_run})")
            db.execute(f"DELETE FROM main.{table}")  # without a condition it frees page by page
            db.execute(f"INSERT INTO main.{table} SELECT * FROM temp.kept")
            db.execute("DROP TABLE temp.kept")
        return
    for at, count in gone.items():
        for end in range(_STEP_ROWS, count + _STEP_ROWS, _STEP_ROWS):
            with database.transaction():
                db.execute(f"DELETE FROM {table} WHERE trace_id = ? AND number < ?", (at, end))


def _shrink(database: Connection) -> None:
    """Give free pages back to the disk: by writing the file anew where they are most of it, else in steps."""
    db = database.connection
    free, pages = (value_of(db.execute(f"PRAGMA {name}")) for name in ("freelist_count", "page_count"))
    if free > pages / 2:
        db.execute("VACUUM")
    for _ in range(0, 0 if free > pages / 2 else free, _STEP_PAGES):
        # frees a page per step, and `execute` makes a single step of a statement without columns; a script runs to its end
        db.executescript(f"PRAGMA incremental_vacuum({_STEP_PAGES})")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
