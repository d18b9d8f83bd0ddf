"""Runs for others: an allow-list of columns, and in them no home, user, host, folder or traceback."""

from __future__ import annotations

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
from nanolib.store.connection import write_schema
from nanolib.store.query import Reader, listed
from nanolib.store.schema import JSON, LISTED, TRACE_TABLES, marks

PUBLIC = {
    "machines": "machine_id cpu cores ram_gib gpus system driver torch threads governor dtypes",
    "runs": "run_id experiment suite label machine_id device params versions git_revision fingerprint cases started duration_s"
    " status message disturbances",
    "measurements": "run_id experiment suite label machine_id case_id factors metric scope unit estimate low high confidence n"
    " predicted provenance method status message flags details",
    "traces": "trace_id run_id case_id names",
}
_TEXTS = (
    "label",
    "suite",
    "device",
    "params",
    "message",
    "disturbances",
    "factors",
    "scope",
    "details",
    "names",
    "gpus",
    "driver",
)
_DROPPED = ("traceback", "corpus")  # keys of JSON
_ALWAYS = {"process": "", "launch": ""}  # columns that cannot be left out of a database
_HOME = re.compile(
    r"(?<![\w/])/(?:home|Users)/[^\s/:'\"]+|(?<![\w/])/root(?=/)|\b[A-Za-z]:\\Users\\[^\s\\:'\"]+"
)
_FOLDERS = re.compile(r"(?:(?<![\w/~.])~?/|\b[A-Za-z]:\\|(?<![\w~])~\\)(?:[^\s/\\:'\"]+[/\\]+)+")


@functools.cache
def _private() -> list[tuple[re.Pattern[str], str]]:
    """This machine's home folder, user and host as patterns, and what takes their place."""
    home, host = str(expanded("~")), platform.node()
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = ""
    words = {user: "user", host: "host", host.partition(".")[0]: "host"}
    tell = {
        name: word
        for name, word in words.items()
        if len(name) > 2 and name not in ("root", "localhost")
    }
    ends = r"(?<![^\W_])", r"(?![^\W_])"  # an underscore is no letter: results_of_NAME
    names = [
        (re.compile(f"{ends[0]}{re.escape(name)}{ends[1]}", re.I), word)
        for name, word in tell.items()
    ]
    own = [(re.compile(re.escape(home) + r"(?![\w.-])"), "~")] if len(home) > 1 else []
    return [*own, (_HOME, "~"), *names, (_FOLDERS, "…/")]


def redact(value: Any) -> Any:
    """Return JSON types without what names a person, a machine or a folder, in keys as in values."""
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
    """Rows of a table, JSON parsed, as others may see them; a run in flight gets no further in a file.

    Args:
        table: A key of `PUBLIC`.
        rows: Its rows; what is not in the allow-list is left out.
    """
    for row in rows:
        public = {
            name: redact(row[name]) if name in _TEXTS else row[name]
            for name in PUBLIC[table].split()
            if name in row
        }
        if public.get("status") == RunStatus.RUNNING:
            public["status"] = str(RunStatus.INTERRUPTED)
        yield public


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Give a path to write to; after the block it is the target, whole, and after an error nothing is.

    Raises:
        BadInput: The target is there, or cannot be written.
    """
    try:
        with put_in_place(target) as file:
            yield file
    except FileExistsError:
        raise BadInput(f"export: {target} exists; name a new file") from None
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(
            f"export: {target} cannot be written ({reason}); free space there, or name another folder"
        ) from error


def export_database(store: Reader, run_ids: Iterable[str], target: Path) -> None:
    """Write runs to a new database that others may see.

    Raises:
        BadInput: The file is there already, or cannot be written.
    """
    ids = listed(run_ids)
    of_runs = f"run_id IN {LISTED}"
    of_machines = f"machine_id IN (SELECT machine_id FROM runs WHERE {of_runs})"
    of_traces = f"trace_id IN (SELECT trace_id FROM traces WHERE {of_runs})"
    with new_file(target) as file:
        write_schema(file, "DELETE")  # which a read-only folder can hold
        with closing(sqlite3.connect(file)) as copy, copy:
            for table, condition in (
                ("machines", of_machines),
                ("runs", of_runs),
                ("measurements", of_runs),
                ("traces", of_runs),
            ):
                held = [
                    row[1] for row in copy.execute(f"PRAGMA table_info({table})") if row[1] != "id"
                ]
                rows = store.connection.execute(
                    f"SELECT {', '.join(held)} FROM {table} WHERE {condition} ORDER BY rowid", [ids]
                )
                parsed = (
                    {name: _parsed(name, value) for name, value in zip(held, row, strict=True)}
                    for row in rows
                )
                for row in parsed:
                    (public,) = public_rows(table, [row])
                    public |= {name: row[name] for name in ("samples",) if name in row}
                    public |= {name: text for name, text in _ALWAYS.items() if name in row}
                    written = {
                        name: json.dumps(value) if name in JSON else value
                        for name, value in public.items()
                    }
                    copy.execute(
                        f"INSERT INTO {table} ({', '.join(written)}) VALUES ({marks(len(written))})",
                        list(written.values()),
                    )
            for table, columns in TRACE_TABLES.items():
                rows = store.connection.execute(f"SELECT * FROM {table} WHERE {of_traces}", [ids])
                copy.executemany(f"INSERT INTO {table} VALUES ({marks(2 + len(columns))})", rows)


def _parsed(name: str, value: Any) -> Any:
    return json.loads(value) if name in JSON else value
