"""Fifty runs of real results go from one database to another, by every command that moves them, and all figures stay."""

import gzip
import shutil
import sqlite3
import uuid
from contextlib import closing

import pytest
from click.testing import CliRunner

from nanolib.cli import main
from nanolib.store import Store
from nanolib.store.schema import TRACE_TABLES
from tests.report.rows import STORED

RUNS = 50
LABELS = (
    "before",
    "before 2",
    "before[1]",
    "a 'q' \"label\"",
    "émoji \U0001f680",
    "שלום",
    "{c} $x %d",
    "",
    "-dash",
    "12",
)


def _copied(db, table, of, **changes):
    """The rows of a run once more, with other values in some columns; their first column is new where it is a number."""
    names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
    for row in db.execute(f"SELECT * FROM {table} WHERE run_id = ?", (of,)).fetchall():
        values = dict(zip(names, row, strict=True)) | changes
        if names[0] != "run_id":
            values[names[0]] = None
        marks = ", ".join("?" * len(names))
        yield row[0], db.execute(f"INSERT INTO {table} VALUES ({marks})", list(values.values())).lastrowid


@pytest.fixture(scope="module")
def fifty(tmp_path_factory):
    path = tmp_path_factory.mktemp("fifty") / "fifty.sqlite"
    with gzip.open(STORED) as packed, path.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    Store(path).close()  # brought to today's layout
    with closing(sqlite3.connect(path)) as db:
        known = [run_id for (run_id,) in db.execute("SELECT run_id FROM runs ORDER BY rowid")]
        for number in range(RUNS - len(known)):
            of = known[number % len(known)]
            run_id = str(uuid.UUID(int=2**100 * (number // 2) + number))  # some begin alike
            changes = {"run_id": run_id, "label": LABELS[number % len(LABELS)]}
            list(_copied(db, "runs", of, **changes, launch=f"{number // 6:08x}"))
            list(_copied(db, "measurements", of, **changes))
            for trace, copy in list(_copied(db, "traces", of, run_id=run_id)):
                for table, columns in TRACE_TABLES.items():
                    listed = ", ".join(("number", *columns))
                    db.execute(f"INSERT INTO {table} SELECT ?, {listed} FROM {table} WHERE trace_id = ?", (copy, trace))
        db.commit()
    return path


def _figures(path):
    """Run → all that is stored of it, but for numbers that each database gives itself."""
    with closing(sqlite3.connect(path)) as db:
        runs = {run[0]: [run] for run in db.execute("SELECT * FROM runs")}
        for row in db.execute("SELECT * FROM measurements ORDER BY run_id, case_id, metric, scope, method"):
            runs[row[1]].append(row[1:])
        for trace, run_id, *rest in db.execute("SELECT * FROM traces ORDER BY run_id, case_id").fetchall():
            for table in TRACE_TABLES:
                rows = db.execute(f"SELECT * FROM {table} WHERE trace_id = ? ORDER BY number", (trace,))
                runs[run_id].append((*rest, table, [row[1:] for row in rows]))
    return runs


@pytest.mark.slow
def test_all_figures_of_fifty_runs_stay_through_every_command(fifty, tmp_path):
    def nano(place, *arguments):
        ended = CliRunner().invoke(main, [*map(str, arguments), "--output", str(tmp_path / place)])
        assert ended.exit_code == 0, ended.output
        return ended.output.splitlines()[-1]

    there = _figures(fifty)
    assert len(there) == RUNS and sum(len(rows) for rows in there.values()) > 5000
    assert nano("here", "merge", fifty).endswith(f": {RUNS} run(s) came in")
    assert _figures(tmp_path / "here" / "results.sqlite") == there
    shared = tmp_path / "shared.sqlite"
    nano("here", "export", shared, "--run", "all")
    told = _figures(shared)
    # What an export leaves out is of no figure: who wrote a run.
    assert {name: rows[1:] for name, rows in told.items()} == {name: rows[1:] for name, rows in there.items()}
    nano("there", "merge", shared)
    assert _figures(tmp_path / "there" / "results.sqlite") == told
    for place in ("here", "there"):
        assert nano(place, "clean", "--keep", 20) == f"{RUNS - 20} run(s) were deleted"
        left = _figures(tmp_path / place / "results.sqlite")
        assert len(left) == 20 and all(
            rows == (there if place == "here" else told)[name] for name, rows in left.items()
        )
    assert nano("here", "merge", fifty, shared).endswith("shared.sqlite: 0 run(s) came in")
    assert _figures(tmp_path / "here" / "results.sqlite") == there
    for label in LABELS:
        if label:
            held = {name for name, (run, *_) in there.items() if run[3] == label}
            assert nano("here", "clean", "--dry-run", f"--run={label}") == f"{len(held)} run(s) would be deleted"
