"""Define the tables of the database, and the record of a run."""

import json
import sqlite3
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanolib.measurement import MOST_LABEL, Measurement, Provenance, RunStatus, Status

# Columns of the tables of readings that are too many for rows of `measurements`.
TRACE_TABLES = {
    "power_samples": "source TEXT, at_us INTEGER, watts REAL, joules REAL, low REAL, high REAL",
    "sections": "name TEXT, at_us INTEGER, ns INTEGER",
    "tokens": "at_us INTEGER, ns INTEGER",
    "layers": "call INTEGER, layer TEXT, ns INTEGER",
    "statistics": "call INTEGER, layer TEXT, statistic TEXT, value REAL",
    "ops": "call INTEGER, layer TEXT, op TEXT, ns INTEGER",
}
TABLES_OF_CASES = ("measurements", *TRACE_TABLES)
JSON = {
    "gpus",
    "dtypes",
    "params",
    "versions",
    "interference",
    "factors",
    "flags",
    "details",
}

SCHEMA_VERSION = 6  # `Store` opens only files of this version.


def _one_of(column: str, words: Iterable[str]) -> str:
    listed = ", ".join(f"'{word}'" for word in words)
    return f"{column} TEXT NOT NULL CHECK ({column} IN ({listed}))"


def _json(column: str) -> str:
    return f"{column} TEXT NOT NULL CHECK (json_valid({column}))"


def _number(column: str) -> str:
    return f"{column} REAL CHECK (abs({column}) < 9e999)"


# The constraints make SQLite refuse invalid rows, including the rows of a merged file.
SCHEMA = (
    f"""CREATE TABLE IF NOT EXISTS machines (
        machine_id TEXT PRIMARY KEY, cpu TEXT, cores INTEGER, ram_gib INTEGER, {_json("gpus")},
        system TEXT, driver TEXT, torch TEXT, threads INTEGER, governor TEXT, {_json("dtypes")}
    ) STRICT""",
    f"""CREATE TABLE IF NOT EXISTS runs (
        run_id TEXT PRIMARY KEY, experiment TEXT NOT NULL,
        suite TEXT NOT NULL CHECK (length(suite) <= {MOST_LABEL}),
        label TEXT NOT NULL CHECK (length(label) <= {MOST_LABEL}),
        machine_id TEXT NOT NULL REFERENCES machines (machine_id), device TEXT NOT NULL,
        {_json("params")}, {_json("versions")}, git_revision TEXT NOT NULL,
        fingerprint TEXT NOT NULL, cases INTEGER NOT NULL, started TEXT NOT NULL,
        {_number("duration_s")}, {_one_of("status", RunStatus)}, message TEXT NOT NULL,
        process TEXT NOT NULL, launch TEXT NOT NULL, {_json("interference")}
    ) STRICT""",
    f"""CREATE TABLE IF NOT EXISTS measurements (
        id INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
        case_id TEXT NOT NULL, {_json("factors")}, metric TEXT NOT NULL, scope TEXT NOT NULL,
        unit TEXT NOT NULL, {_number("estimate")}, {_number("low")}, {_number("high")},
        confidence REAL CHECK (confidence BETWEEN 0 AND 1), n INTEGER NOT NULL CHECK (n >= 0),
        samples BLOB CHECK (length(samples) % 8 = 0), {_number("predicted")},
        {_one_of("provenance", Provenance)}, method TEXT NOT NULL, {_one_of("status", Status)},
        message TEXT NOT NULL, {_json("flags")}, {_json("details")},
        UNIQUE (run_id, case_id, metric, scope, method)
    ) STRICT""",
    "CREATE INDEX IF NOT EXISTS measurements_by_case ON measurements (case_id, metric)",
    "CREATE INDEX IF NOT EXISTS runs_by_fingerprint ON runs (fingerprint)",
    # The view adds the columns of runs, so the table of measurements does not repeat these columns.
    """CREATE VIEW IF NOT EXISTS results AS SELECT
        id, run_id, experiment, suite, label, machine_id, case_id, factors, metric, scope, unit,
        estimate, low, high, confidence, n, samples, predicted, provenance, method,
        m.status AS status, m.message AS message, flags, details
    FROM measurements m JOIN runs USING (run_id)""",
    *(
        f"""CREATE TABLE IF NOT EXISTS {name} (
            id INTEGER PRIMARY KEY, run_id TEXT NOT NULL REFERENCES runs (run_id) ON DELETE CASCADE,
            case_id TEXT NOT NULL, {columns}
        ) STRICT"""
        for name, columns in TRACE_TABLES.items()
    ),
    *(
        f"CREATE INDEX IF NOT EXISTS {name}_by_case ON {name} (run_id, case_id)"
        for name in TRACE_TABLES
    ),
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

# Queries take values as one JSON list, because SQLite limits the number of `?` in a query.
LISTED = "(SELECT value FROM json_each(?))"


def json_list(names: Iterable[str]) -> str:
    """Return names as a JSON list, the value for `LISTED` in a query."""
    return json.dumps(list(names))


@dataclass(frozen=True)
class Run:
    """One execution of an experiment.

    Attributes:
        experiment: Name of the notebook.
        machine: Machine of the run, from `Machine.to_dict`.
        params: Parameters of the run, of JSON types.
        suite: Name of the suite, or an empty string.
        label: Name that the user gave the run, or an empty string.
        device: Device of the run.
        versions: Versions of the packages that affect the results.
        git_revision: Git revision of the checkout, or an empty string.
        fingerprint: Hash of the parameters, versions and machine. `--resume` continues the last run
            with the same hash.
        cases: Number of cases.
        process: Name of the process that writes the run, from `process_name`.
        launch: Token of the command that started the run, and the title of the job.
        interference: Lines about interference at the start of the run. During its cases, flags of
            the rows show interference.
        rows: Factors and measurements of each case, by case ID. Give them only to add a run that
            is already complete.
        run_id: UUID of the run.

    Example:
        >>> Run("attention", machine={"name": "a machine"}, label="before").label
        'before'
    """

    experiment: str
    machine: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    suite: str = ""
    label: str = ""
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)
    git_revision: str = ""
    fingerprint: str = ""
    cases: int = 0
    process: str = ""
    launch: str = ""
    interference: Sequence[str] = ()
    rows: Mapping[str, tuple[Mapping[str, Any], list[Measurement]]] = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))


def encode(column: str, value):
    """Return a value as JSON text for a JSON column, or unchanged for another column."""
    return json.dumps(value, default=_plain, allow_nan=False) if column in JSON else value


def insert(
    db: sqlite3.Connection, table: str, row: Mapping[str, Any], verb: str = "INSERT"
) -> None:
    """Insert a row, a mapping from columns to values. `REPLACE` replaces a row of the same key."""
    values = [encode(name, value) for name, value in row.items()]
    marks = ", ".join("?" * len(values))
    db.execute(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({marks})", values)


def insert_traces(db: sqlite3.Connection, table: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert rows of a trace table, each with all of its columns except `id`."""
    marks = ", ".join("?" * len(columns_of(db, table)))
    db.executemany(f"INSERT INTO {table} VALUES (NULL, {marks})", rows)


def columns_of(db: sqlite3.Connection, table: str) -> list[str]:
    """Return the names of a table's columns, without `id`. Each database numbers its own rows."""
    query = "SELECT name FROM pragma_table_info(?, 'main') WHERE name != 'id'"
    return [name for (name,) in db.execute(query, (table,))]


def _plain(value):
    if hasattr(value, "item"):  # Scalars of numpy and torch have `item`.
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
