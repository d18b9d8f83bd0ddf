"""Databases with any value that SQLite can hold in any column, and whether every command bears them."""

import contextlib
import json
import re
import sqlite3
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from hypothesis import strategies as st

from nanolib.cli import main
from nanolib.experiments.summary.cases import Params, changes, load
from nanolib.measurement import METRICS, BadInput, Measurement, Provenance, RunStatus, Status
from nanolib.report.page import build
from nanolib.run.plan import known_ceilings
from nanolib.store import Run, Store
from nanolib.store.schema import TRACE_TABLES
from tests.report.rows import ATTENTION, model_rows, warmup_rows
from tests.shown import SECTIONS

TABLES = ("machines", "runs", "measurements", "traces", *TRACE_TABLES)
_WORDS = [
    *METRICS,
    *Status,
    *Provenance,
    *RunStatus,
    "attention",
    "model",
    "warmup",
    "fp8",
    "energy",
    "distributed",
    "ab",
]
_WORDS += [
    "",
    "nan",
    "1e999",
    "12",
    "x: y",
    "a b c",
    "\0",
    "\x1b[31m",
    "\u202e",
    "=1+1",
    "2999-01-01T00:00:00Z",
    "row-1",
    "latest",
]
_TEXTS = [
    "[]",
    "{}",
    "null",
    "NaN",
    "[NaN]",
    '{"a": Infinity}',
    "[" * 5000,
    '["\\ud800"]',
    '{"a": 1e999}',
    f"[{'9' * 5000}]",
]
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(_WORDS)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


MACHINE = {
    "cpu": "c",
    "cores": 2,
    "ram_gib": 8,
    "gpus": [{"name": "g", "memory_gib": 80, "fp8": True}],
    "dtypes": {"float32": "avx"},
}


def _few(rows: dict[str, Any]) -> dict[str, Any]:
    """Every so many of the cases: each command reads all of them, hundreds of times."""
    every = max(1, len(rows) // 6)
    return dict(list(rows.items())[::every])


def make_good(path: Path, prefix: str = "") -> None:
    """A database with runs of several experiments on two machines, one in flight, with traces."""
    decode = Measurement(
        "latency", 3.0, 2.0, 4.0, 0.95, 20, (3.0,) * 20, scope="decode", details={"p50": 3, "p95": 4, "p99": 5}
    )
    shape = {
        "name": "tiny",
        "attention_type": "dense",
        "seq_len": 512,
        "batch_size": 1,
        "dtype": "float32",
        "device": "cpu",
    }
    ended = Measurement("case_time", 1.0, details={"attempts": 1})
    models = model_rows() | {"decode": (shape | {"mode": "inference"}, [ended, decode])}
    peaks = [Measurement("ceiling_flops", 1e11, scope="float32"), Measurement("ceiling_bytes", 1e10, scope="copy")]
    ceilings = {"ceilings": ({"name": "ceilings"}, [ended, *peaks])}
    started = [Measurement("case_time", status=Status.STARTED, details={"attempts": 2})]
    with Store(path) as store:
        for at, (experiment, rows) in enumerate(
            [
                ("attention", _few(ATTENTION) | ceilings),
                ("attention", _few(ATTENTION)),
                ("model", _few(models)),
                ("warmup", _few(warmup_rows())),
            ]
        ):
            machine = MACHINE | {"machine_id": f"m{at % 2}"}
            store.add(
                Run(experiment, machine, {"seed": 1}, versions={"torch": "2"}, rows=rows, run_id=f"{prefix}run-{at}")
            )
        flying = store.add(Run("attention", machine, run_id=f"{prefix}run-flying", disturbances=["busy"]))
        store.write_case(flying, "c", {"name": "dense", "seq_len": 8}, started)
        trace = store.new_trace(f"{prefix}run-2", "decode")
        name = trace.name("decoder")
        rows = {"source": name, "name": name, "layer": name, "statistic": name, "op": name, "watts": 1.5, "value": 0.5}
        for table, columns in TRACE_TABLES.items():
            trace.put(table, [tuple(rows.get(column, 7) for column in columns)] * 2)
    with Store(path) as store:
        store.connection.execute("PRAGMA journal_mode = DELETE").fetchall()


@dataclass(frozen=True)
class Change:
    """One cell, and what is put there.

    Attributes:
        table: Of which table.
        column: Which column, by its number.
        row: Which row, by its number.
        value: What is put there; where that has a `key`, it is put into the JSON that is there.
        key: The name in the JSON, by its number; None replaces the whole cell.
        as_text: Whether bytes become text, though they are none.
        everywhere: Whether all rows of the same run that hold the same get it.
    """

    table: str
    column: int
    row: int
    value: Any
    key: int | None = None
    as_text: bool = False
    everywhere: bool = False


_NUMBERS = (
    st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([0, -1, 1])
    | st.floats()
    | st.sampled_from([1e308, 5e-324, -1.5])
)
_VALUES = st.none() | _NUMBERS | st.text(max_size=20) | st.binary(max_size=20) | st.sampled_from(_WORDS + _TEXTS)
_PLACES = {
    "table": st.sampled_from(("measurements",) * 4 + ("runs",) * 3 + TABLES),
    "column": st.integers(0, 40),
    "row": st.integers(0, 10_000),
    "everywhere": st.booleans(),
}
CHANGES = st.builds(Change, **_PLACES, value=_VALUES | _JSON.map(json.dumps), as_text=st.booleans()) | st.builds(
    Change, **_PLACES, value=st.just(...) | _JSON, key=st.integers(0, 30)
)


def put(path: Path, change: Change) -> None:
    """Put a value into a cell against its column's type and constraints, and leave the tables as they were declared."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.text_factory = bytes
        (sql,) = db.execute(
            "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?", (change.table,)
        ).fetchone()
    bare = re.sub(
        rb" (TEXT|REAL|BLOB|INTEGER(?! PRIMARY)|NOT NULL|REFERENCES \w+ \(\w+\)( ON DELETE CASCADE)?)\b", b"", sql
    )
    bare = re.sub(rb" (NOT NULL|REFERENCES \w+ \(\w+\)( ON DELETE CASCADE)?)", b"", bare)
    _declare(path, change.table, bare)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.text_factory = lambda text: text.decode(errors="replace")
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({change.table})")]
        column = columns[change.column % len(columns)]
        keys = ("trace_id", "number") if change.table in TRACE_TABLES else ("rowid",)
        rows = db.execute(f"SELECT {', '.join(keys)}, {column} FROM {change.table}").fetchall()
        *key, before = rows[change.row % len(rows)]
        value = _inside(before, change) if change.key is not None else change.value
        mark = "CAST(? AS TEXT)" if change.as_text and isinstance(value, bytes) else "?"
        where = f"{column} IS ?" if change.everywhere else " AND ".join(f"{name} = ?" for name in keys)
        with contextlib.suppress(sqlite3.IntegrityError, OverflowError):  # a number that is there, or no row's number
            db.execute(
                f"UPDATE {change.table} SET {column} = {mark} WHERE {where}",
                (value, *([before] if change.everywhere else key)),
            )
    _declare(path, change.table, sql)


def _inside(before: Any, change: Change) -> Any:
    """The JSON that was there with one of its values changed, or left out."""
    try:
        found = json.loads(before)
    except (TypeError, ValueError):
        return json.dumps(None if change.value is ... else change.value)
    if isinstance(found, dict) and found:
        name = sorted(found)[change.key % len(found)]
        found = {key: item for key, item in found.items() if key != name}
        if change.value is not ...:
            found[name] = change.value
    elif change.value is not ...:
        found = [*found, change.value] if isinstance(found, list) else {"x": change.value}
    return json.dumps(found)


def _declare(path: Path, table: str, sql: bytes) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_master SET sql = ? WHERE type = 'table' AND name = ?", (sql.decode(), table))


def contents(path: Path) -> list[Any]:
    """All rows of a database."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.text_factory = bytes
        return [(table, sorted(map(repr, db.execute(f"SELECT * FROM {table}")))) for table in TABLES]


def commands_bear(folder: Path, *, report: bool = True) -> list[str]:
    """Commands over the database of an output folder that end in anything but an answer or one line: what each ended in."""
    path, failures = folder / "results.sqlite", []

    def nano(*arguments: str) -> str:
        ended = CliRunner().invoke(main, [*arguments, "--output", str(folder)])
        if ended.exception is not None and not isinstance(ended.exception, SystemExit):
            failures.append(f"{' '.join(arguments[:3])}: {ended.exception!r}")
            failures.append("".join(traceback.format_exception(ended.exception)[-4:]))
        elif ended.exit_code not in (0, 1, 2) or (ended.exit_code == 2 and len(ended.output.strip().splitlines()) != 1):
            failures.append(f"{' '.join(arguments[:3])}: exit {ended.exit_code}: {ended.output}")
        return ended.output

    def call(name: str, function: Any) -> None:
        try:
            function()
        except BadInput:
            pass
        except Exception as error:  # whatever it is, it is what is looked for
            failures.append(f"{name}: {error!r}")
            failures.append("".join(traceback.format_exception(error)[-4:]))

    nano("runs")
    nano("history", "--all")
    with Store(path) as store:
        ids = store.resolve("all")
        call("load", lambda: load(Params(runs=["all"], database=str(path))))
        call("changes", lambda: changes(Params(runs=["newest"], database=str(path))))
        call("ceilings", lambda: known_ceilings(store, "m1"))
        for table in TRACE_TABLES:
            call(table, lambda table=table: store.trace(table))
        if report:
            call("report", lambda: build(store, ids, folder / "report", SECTIONS, pictures=False))
    nano("compare", ids[0], ids[-1])
    for ending in ("sqlite", "json", "csv", "md"):
        target = folder / f"all.{ending}"
        nano("export", str(target), "--run", "all")
        target.unlink(missing_ok=True)
    nano("clean", "--older-than", "1d", "--dry-run")
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE runs SET status = 'done' WHERE status = 'running'")
        db.commit()
    said = nano("clean", *(part for run_id in ids for part in ("--run", run_id)))
    with contextlib.closing(sqlite3.connect(path)) as db:
        if left := db.execute("SELECT count(*) FROM runs").fetchone()[0]:
            failures.append(f"clean --run: {left} runs stay: {said}")
    return failures
