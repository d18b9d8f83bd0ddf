"""Export runs without private data: no names of users, hosts or folders, and no tracebacks."""

import functools
import getpass
import json
import platform
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from nanolib.measurement import BadInput, RunStatus
from nanolib.paths import expanded, put_in_place
from nanolib.store.connection import make_tables
from nanolib.store.query import Reader
from nanolib.store.schema import (
    JSON,
    LISTED,
    TABLES_OF_CASES,
    TRACE_TABLES,
    columns_of,
    insert,
    listed,
)

PUBLIC = {
    "machines": (
        "machine_id",
        "cpu",
        "cores",
        "ram_gib",
        "gpus",
        "system",
        "driver",
        "torch",
        "threads",
        "governor",
        "dtypes",
    ),
    "runs": (
        "run_id",
        "experiment",
        "suite",
        "label",
        "machine_id",
        "device",
        "params",
        "versions",
        "git_revision",
        "fingerprint",
        "cases",
        "started",
        "duration_s",
        "status",
        "message",
        "interference",
    ),
    "measurements": (
        "run_id",
        "experiment",
        "suite",
        "label",
        "machine_id",
        "case_id",
        "factors",
        "metric",
        "scope",
        "unit",
        "estimate",
        "low",
        "high",
        "confidence",
        "n",
        "predicted",
        "provenance",
        "method",
        "status",
        "message",
        "flags",
        "details",
    ),
}
_TEXTS = {
    "label",
    "suite",
    "device",
    "params",
    "message",
    "interference",
    "factors",
    "scope",
    "details",
    "gpus",
    "driver",
}
_DROPPED = ("traceback", "corpus", "power_trace")  # JSON keys that an export leaves out.
_REQUIRED = {"process", "launch"}  # The schema requires these columns. An export leaves them empty.
_HOME = re.compile(
    r"(?<![\w/])/(?:home|Users)/[^\s/:'\"]+|(?<![\w/])/root(?=/)|\b[A-Za-z]:\\Users\\[^\s\\:'\"]+"
)
_FOLDERS = re.compile(r"(?:(?<![\w/~.])~?/|\b[A-Za-z]:\\|(?<![\w~])~\\)(?:[^\s/\\:'\"]+[/\\]+)+")


@functools.cache
def _private() -> list[tuple[re.Pattern[str], str]]:
    """Return patterns of the home folder, user, host and folders, each with its replacement."""
    home, host = str(expanded("~")), platform.node()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # The system has no name for the user.
        user = ""
    patterns = []
    if len(home) > 1:
        patterns.append((re.compile(re.escape(home) + r"(?![\w.-])"), "~"))
    patterns.append((_HOME, "~"))
    for name, word in {user: "user", host: "host", host.partition(".")[0]: "host"}.items():
        if len(name) > 2 and name not in ("root", "localhost"):
            # A name in `results_of_NAME` counts as a whole word too.
            whole = rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"
            patterns.append((re.compile(whole, re.I), word))
    return [*patterns, (_FOLDERS, "…/")]


def redact(value: Any) -> Any:
    """Replace the names of people, machines and folders in a value of JSON types."""
    if isinstance(value, str):
        for pattern, word in _private():
            value = pattern.sub(word, value)
        return value
    if isinstance(value, Mapping):
        return {redact(key): redact(item) for key, item in value.items() if key not in _DROPPED}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


def public_rows(table: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the public columns of rows, without private names.

    A run in progress becomes `interrupted`, because the exported file never changes.

    Args:
        table: Name of the table, a key of `PUBLIC`.
        rows: Rows of the table, with parsed JSON columns.
    """
    for row in rows:
        public = {name: row[name] for name in PUBLIC[table] if name in row}
        public |= {name: redact(value) for name, value in public.items() if name in _TEXTS}
        if public.get("status") == RunStatus.RUNNING:
            public["status"] = str(RunStatus.INTERRUPTED)
        yield public


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path. If the context ends without an error, move the file to `target`.

    Raises:
        BadInput: The target cannot be written.
    """
    try:
        with put_in_place(target) as file:
            yield file
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"export: {target} cannot be written ({reason}); "
            "free space on the disk, or name another folder"
        ) from error


def export_database(store: Reader, run_ids: Iterable[str], target: Path) -> None:
    """Write runs to a new database without private data.

    Args:
        store: Database with the runs.
        run_ids: IDs of the runs.
        target: Path of the new database.

    Raises:
        BadInput: The file cannot be written.
    """
    ids, of_runs = [listed(run_ids)], f"run_id IN {LISTED}"
    chosen = {
        "machines": f"machine_id IN (SELECT machine_id FROM runs WHERE {of_runs})",
        "runs": of_runs,
    } | dict.fromkeys(TABLES_OF_CASES, of_runs)
    with new_file(target) as file, closing(sqlite3.connect(file)) as copy, copy:
        make_tables(copy, "DELETE")  # A file with WAL cannot be read in a read-only folder.
        for table, condition in chosen.items():
            names = columns_of(copy, table)
            query = f"SELECT {', '.join(names)} FROM {table} WHERE {condition} ORDER BY rowid"
            for values in store.connection.execute(query, ids):
                row = dict(zip(names, values, strict=True))
                insert(
                    copy,
                    table,
                    redact(row) if table in TRACE_TABLES else _public_row(table, row),
                )


def _public_row(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without private data, with all required columns of its table."""
    parsed = {name: json.loads(row[name]) if name in JSON else row[name] for name in row}
    (public,) = public_rows(table, [parsed])
    kept = {"samples": row["samples"]} if "samples" in row else {}
    return dict.fromkeys(_REQUIRED & row.keys(), "") | public | kept
