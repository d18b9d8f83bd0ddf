"""Export runs without private data: no names of users, hosts or folders, and no tracebacks."""

from __future__ import annotations

import functools
import getpass
import json
import platform
import re
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanolib.measurement import BadInput, RunStatus
from nanolib.paths import expand_home, put_in_place
from nanolib.store.connection import make_tables, unusable
from nanolib.store.query import Reader
from nanolib.store.schema import JSON, LISTED, TABLES_OF_CASES, columns_of, insert, json_list

if TYPE_CHECKING:
    import pandas as pd

_PRIVATE = ("process", "launch")  # Columns that an export leaves empty.
_DROPPED = ("traceback", "corpus", "power_trace")  # JSON keys that an export leaves out.
_FREE_TEXTS = ("label", "suite", "message", "interference", "source")
# In other columns, only a path or the function of a user's module may contain a name.
_PATH_OR_FUNCTION = re.compile(r"[/\\~]|\w:[A-Za-z_]")
_HOME = re.compile(
    r"(?<![\w/])/(?:home|Users)/[^\s/:'\"]+|(?<![\w/])/root(?=/)|\b[A-Za-z]:\\Users\\[^\s\\:'\"]+"
)
_FOLDERS = re.compile(r"(?:(?<![\w/~.])~?/|\b[A-Za-z]:\\|(?<![\w~])~\\)(?:[^\s/\\:'\"]+[/\\]+)+")


@functools.cache
def _private():
    """Return patterns of the home folder, user, host and folders, each with its replacement."""
    home, host = str(expand_home("~")), platform.node()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # The system has no name for the user.
        user = ""
    patterns = [(_HOME, "~")]
    if len(home) > 1:
        patterns.append((re.compile(re.escape(home) + r"(?![\w.-])"), "~"))
    for name, word in {user: "user", host: "host", host.partition(".")[0]: "host"}.items():
        if len(name) > 2 and name not in ("root", "localhost"):
            # A name in `results_of_NAME` counts as a whole word too.
            whole = rf"(?<![^\W_]){re.escape(name)}(?![^\W_])"
            patterns.append((re.compile(whole, re.I), word))
    return [*patterns, (_FOLDERS, "…/")]


def redact(value, column: str = "message"):
    """Replace the names of people, machines and folders in a value of JSON types.

    The words of nanolib stay, even on the machine of a user with the name `max` or `dense`.

    Args:
        value: A value of JSON types.
        column: Name of the column or JSON key of the value.

    Returns:
        The value with the same keys, but without the keys that an export leaves out.
    """
    if isinstance(value, str):
        if column in _FREE_TEXTS or _PATH_OR_FUNCTION.search(value):
            for pattern, word in _private():
                value = pattern.sub(word, value)
        return value
    if isinstance(value, Mapping):
        return {key: redact(item, key) for key, item in value.items() if key not in _DROPPED}
    if isinstance(value, list | tuple):
        return [redact(item, column) for item in value]
    return value


def public_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of any table without private data.

    A run in progress becomes `interrupted`, because the exported file never changes.

    Args:
        row: Columns of the row, with parsed JSON columns.
    """
    public = redact(row) | {name: "" for name in _PRIVATE if name in row}
    if public.get("status") == RunStatus.RUNNING:
        public["status"] = RunStatus.INTERRUPTED
    return public


def write(store: Reader, run_ids: list[str], target: Path) -> None:
    """Write runs to a file whose ending sets the format. A failed export leaves no partial file.

    Args:
        store: Store with the runs.
        run_ids: IDs of the runs.
        target: Path that ends with `.sqlite` or `.json`.

    Raises:
        BadInput: The ending is unknown, there are no runs, the file exists, or the database is
            damaged.
        OSError: The file cannot be written.
        sqlite3.Error: The database cannot be written.
    """
    if target.suffix not in (".sqlite", ".json"):
        raise BadInput(f"export: {target.name!r} has no known ending; use .sqlite or .json")
    if not run_ids:
        raise BadInput("export: there are no runs to write; run: nano run quick")
    if target.exists():
        raise BadInput(f"export: {target} exists; name a new file")
    # SQLite reads a part of a damaged file without an error, so other people would get that part.
    ((state,),) = store.connection.execute("PRAGMA quick_check(1)")
    if state != "ok":
        raise BadInput(unusable(store.path, sqlite3.DatabaseError(state)))
    with put_in_place(target) as file:
        if target.suffix == ".sqlite":
            _write_database(store, run_ids, file)
        else:
            runs, machines = store.runs_of(run_ids), store.machines()
            machines = machines[machines["machine_id"].isin(runs["machine_id"])]
            tables = {"runs": runs, "machines": machines}
            text = json_text(tables | {"measurements": store.measurements(run_ids)})
            file.write_text(text, encoding="utf-8", errors="backslashreplace")


def json_text(tables: Mapping[str, pd.DataFrame], **more) -> str:
    """Return database tables as JSON, without private data, samples and NaN.

    Args:
        tables: Rows of each table, by the name of the table.
        more: Further values of the JSON object.
    """
    content = {}
    for name, rows in tables.items():
        factors = rows.columns.str.startswith("factor.")
        rows = rows.loc[:, ~factors].drop(columns=["id", "samples"], errors="ignore")
        records = rows.astype(object).where(rows.notna(), None).to_dict("records")
        content[name] = [public_row(row) for row in records]
    return json.dumps(content | more, indent=1, ensure_ascii=False, allow_nan=False)


def _write_database(store: Reader, run_ids: Iterable[str], file: Path):
    """Write runs to a new database without private data."""
    ids, of_runs = [json_list(run_ids)], f"run_id IN {LISTED}"
    chosen = {
        "machines": f"machine_id IN (SELECT machine_id FROM runs WHERE {of_runs})",
        "runs": of_runs,
    } | dict.fromkeys(TABLES_OF_CASES, of_runs)
    with closing(sqlite3.connect(file)) as copy, copy:
        make_tables(copy, "DELETE")  # A file with WAL cannot be read in a read-only folder.
        for table, condition in chosen.items():
            names = columns_of(copy, table)
            query = f"SELECT {', '.join(names)} FROM {table} WHERE {condition} ORDER BY rowid"
            for values in store.connection.execute(query, ids):
                row = {
                    name: json.loads(value) if name in JSON else value
                    for name, value in zip(names, values, strict=True)
                }
                insert(copy, table, public_row(row))
