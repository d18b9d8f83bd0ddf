"""One SQLite file: runs, machines, measurements, traces. One transaction per case: a kill loses the case in flight alone."""

from __future__ import annotations

import json
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanolib.files import address, check_length, writable
from nanolib.measurement import METRICS, BadInput, Measurement, RunStatus, Status
from nanolib.merging import merge_machines, merge_runs
from nanolib.paths import database_path, make_folder
from nanolib.schema import APPLICATION_ID, MIGRATIONS, NAMED, SCHEMA_VERSION, TRACE_TABLES, Run
from nanolib.sharing import Redaction, new_file
from nanolib.traces import Trace, TraceWriter

if TYPE_CHECKING:
    import pandas as pd


__all__ = ["Run", "Store"]

_WAIT_S, _RETRY_S = 5, 0.02  # for another who writes; between two tries
SHOWN_CASES = 400  # of an experiment, the newest: what a person can still look at, and a browser draw
_LISTED = "(SELECT value FROM json_each(?))"  # any number of them; a query takes a limited number of marks

# of an exported table, the rows that belong to the runs chosen, by the first of these columns that it has
_CHOSEN = {
    "run_id": f"run_id IN {_LISTED}",
    "trace_id": f"trace_id IN (SELECT trace_id FROM traces WHERE run_id IN {_LISTED})",
    "machine_id": f"machine_id IN (SELECT machine_id FROM runs WHERE run_id IN {_LISTED})",
}

_NEWEST = (
    "WITH pairs AS (SELECT DISTINCT run_id, case_id FROM measurements WHERE {condition}),"
    " aged AS (SELECT run_id, case_id, r.rowid AS number, experiment,"
    " row_number() OVER (PARTITION BY machine_id, case_id ORDER BY r.rowid DESC) AS age"
    " FROM pairs JOIN runs r USING (run_id)),"
    " shown AS (SELECT run_id, case_id, row_number() OVER (PARTITION BY experiment ORDER BY number DESC) AS place"
    " FROM aged WHERE age = 1)"
    " SELECT {columns} FROM shown JOIN measurements m USING (run_id, case_id) WHERE place <= ? ORDER BY m.id"
)


class Store:
    """The results in one file.

    Args:
        path: The database; made if it is missing, together with its folder.
        create: Whether a missing file, or an empty one, may be made into a database.

    A file that cannot be written, or whose folder cannot, is read as it is.

    Raises:
        BadInput: The file is missing or empty (with `create=False`), is no database, not ours, newer than this version (or
            older, where it cannot be written), or damaged.
    """

    def __init__(self, path: str | Path | None = None, *, create: bool = True) -> None:
        self.path = Path(path) if path is not None else database_path()
        self._writer: TraceWriter | None = None
        self._traces: dict[tuple[str, str], Trace] = {}
        if not self.path.exists():
            if not create:
                raise BadInput(f"database: {self.path} does not exist; run `nano run quick` first or name another")
            make_folder(self.path.parent)
        elif not create and not self.path.stat().st_size:
            raise BadInput(f"database: {self.path} is empty; name another")
        try:
            check_length(self.path)
            self.connection = sqlite3.connect(address(self.path), timeout=_WAIT_S, isolation_level=None, uri=True)
            self._open()
        except sqlite3.DatabaseError as error:
            raise BadInput(f"database: {self.path} cannot be opened ({error}); name another, or move it away") from None

    def _open(self) -> None:
        execute = self.connection.execute
        execute(f"PRAGMA busy_timeout = {1000 * _WAIT_S}")
        execute("BEGIN")  # one moment's view: another process may be making the same file
        version = _value(execute("PRAGMA user_version"))
        application = _value(execute("PRAGMA application_id"))
        empty = not _value(execute("SELECT count(*) FROM sqlite_master"))
        execute("COMMIT")
        if not empty and application != APPLICATION_ID:
            raise BadInput(f"database: {self.path} is not nanolib's; name another")
        if version > SCHEMA_VERSION:
            raise BadInput(
                f"database: {self.path} has schema {version}, newer than this nanolib's {SCHEMA_VERSION}; update nanolib"
            )
        if not writable(self.path):
            if version < SCHEMA_VERSION:
                raise BadInput(
                    f"database: {self.path} has schema {version}, this nanolib {SCHEMA_VERSION}, and it cannot be written; copy it"
                )
            return
        if empty:
            execute("PRAGMA auto_vacuum = INCREMENTAL")  # only takes hold before the first table
        # A network file system may refuse WAL; the mode in force is asked for, and the classic journal serves as well.
        self.journal_mode = _value(self._patiently("PRAGMA journal_mode = WAL"))
        execute("PRAGMA synchronous = NORMAL" if self.journal_mode == "wal" else "PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        if version < SCHEMA_VERSION:
            with self._transaction():
                # a second process may have migrated meanwhile
                version = _value(execute("PRAGMA user_version"))
                for number in range(version, SCHEMA_VERSION):
                    for statement in MIGRATIONS[number].split(";"):
                        execute(statement)
                execute(f"PRAGMA application_id = {APPLICATION_ID}")
                execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _patiently(self, statement: str) -> sqlite3.Cursor:
        """Try again while others are opening the file: for a change of its journal SQLite itself does not wait."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                return self.connection.execute(statement)
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_S)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing.

        Raises:
            BadInput: The file cannot be written: its disk is full, it is read-only, or others write for too long.
        """
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._roll_back()
            raise BadInput(
                f"database: {self.path} cannot be written ({error}); free space there, or name another folder"
            ) from error
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        if self.connection.in_transaction:  # of some errors SQLite does it by itself
            self.connection.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file; traces on their way are written first."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # writing

    def add(self, run: Run) -> str:
        """Add a run: its row with status `running`, or, when it brings its rows along, all of it as `done`.

        Returns:
            Its run_id.
        """
        machine = dict(run.machine)
        status = RunStatus.DONE if run.rows else RunStatus.RUNNING
        with self._transaction() as db:
            columns = ("machine_id", "cpu", "cores", "ram_gib", "system", "driver", "torch", "threads", "governor")
            values = [machine.get(name) for name in columns]
            db.execute(
                f"INSERT OR REPLACE INTO machines ({', '.join(columns)}, gpus, dtypes) VALUES ({_marks(11)})",
                [*values, _json(machine.get("gpus", [])), _json(machine.get("dtypes", {}))],
            )
            db.execute(
                f"INSERT INTO runs VALUES ({_marks(18)})",
                (
                    run.run_id,
                    run.experiment,
                    run.suite,
                    run.label,
                    machine["machine_id"],
                    run.device,
                    _json(run.params),
                    _json(run.versions),
                    run.git_revision,
                    run.fingerprint,
                    run.cases or len(run.rows),
                    _now(),
                    None,
                    status,
                    "",
                    run.process,
                    run.launch,
                    _json(list(run.disturbances)),
                ),
            )
            for case_id, (factors, measurements) in run.rows.items():
                self._write_case(db, run.run_id, case_id, factors, measurements)
        return run.run_id

    def write_case(
        self, run_id: str, case_id: str, factors: Mapping[str, Any], measurements: Iterable[Measurement]
    ) -> None:
        """Replace all rows of one case, in one transaction."""
        with self._transaction() as db:
            db.execute("DELETE FROM measurements WHERE run_id = ? AND case_id = ?", (run_id, case_id))
            self._write_case(db, run_id, case_id, factors, measurements)

    @staticmethod
    def _write_case(
        db: sqlite3.Connection,
        run_id: str,
        case_id: str,
        factors: Mapping[str, Any],
        measurements: Iterable[Measurement],
    ) -> None:
        run = db.execute("SELECT experiment, suite, label, machine_id FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        if run is None:
            raise BadInput(f"run: {run_id} is not in the database; add it first")
        db.executemany(
            "INSERT INTO measurements (run_id, experiment, suite, label, machine_id, case_id, factors, metric, scope, unit,"
            " estimate, low, high, confidence, n, samples, predicted, provenance, method, status, message, flags, details)"
            f" VALUES ({_marks(23)})",
            [
                (
                    run_id,
                    *run,
                    case_id,
                    _json(factors),
                    m.metric,
                    m.scope,
                    METRICS[m.metric].unit,
                    m.estimate,
                    m.low,
                    m.high,
                    m.confidence,
                    m.n,
                    struct.pack(f"<{len(m.samples)}d", *m.samples),
                    m.predicted,
                    m.provenance,
                    m.method,
                    m.status,
                    m.message,
                    _json(m.flags),
                    _json(m.details),
                )
                for m in measurements
            ],
        )

    def update_run(self, run_id: str, **values: Any) -> None:
        """Set columns of a run: status, message, duration_s, process, launch, cases, label or suite."""
        allowed = {"status", "message", "duration_s", "process", "launch", "cases", "label", "suite"}
        if unknown := set(values) - allowed:
            raise BadInput(f"run: {', '.join(sorted(unknown))} cannot be set; only {', '.join(sorted(allowed))} can")
        settings = ", ".join(f"{name} = ?" for name in values)
        with self._transaction() as db:
            db.execute(f"UPDATE runs SET {settings} WHERE run_id = ?", (*values.values(), run_id))
            for name in {"label", "suite"} & set(values):  # which each row has too
                db.execute(f"UPDATE measurements SET {name} = ? WHERE run_id = ?", (values[name], run_id))

    # traces

    def new_trace(self, run_id: str, case_id: str) -> Trace:
        """An empty trace of a case; what an earlier try of it left is deleted.

        Raises:
            BadInput: There is no such run.
        """
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)).fetchone() is None:
                raise BadInput(f"run: {run_id} is not in the database; add it first")
            db.execute("DELETE FROM traces WHERE run_id = ? AND case_id = ?", (run_id, case_id))
            row = db.execute("INSERT INTO traces (run_id, case_id) VALUES (?, ?)", (run_id, case_id))
        self._writer = self._writer or TraceWriter(self.path)
        return Trace(self._writer, row.lastrowid)

    def add_power_samples(
        self, samples: Iterable[Any], *, run_id: str = "", case_id: str = "", source: str = "power"
    ) -> None:
        """Queue power samples; `commit_transaction` waits until they are written.

        Args:
            samples: Mappings or objects with `t_s` (s, any clock) and `watts` or `joules`, and `low` and `high` for an estimate.
            run_id: Of which run; the newest by default.
            case_id: Of which case.
            source: What gave them.

        Raises:
            BadInput: No such run, or a sample without a moment or a value.
        """
        run_id = run_id or self.resolve("latest")[-1]
        rows = [_power_row(sample) for sample in samples]  # all are looked at before any is taken in
        if (run_id, case_id) not in self._traces:
            self._traces[run_id, case_id] = self.new_trace(run_id, case_id)
        trace = self._traces[run_id, case_id]
        name = trace.name(source)
        trace.put("power_samples", [(name, *row) for row in rows])

    def commit_transaction(self) -> None:
        """Wait until every queued row of a trace is committed.

        Raises:
            BadInput: Some could not be written.
        """
        if self._writer is not None and (failure := self._writer.flush()):
            raise BadInput(
                f"traces: some rows of {self.path} could not be written ({failure}); free space, or name another"
            )

    def trace(self, table: str, run_ids: Iterable[str] | None = None) -> pd.DataFrame:
        """The rows of one kind of trace, in the order in which they were seen.

        Args:
            table: A key of `TRACE_TABLES`: `power_samples`, `sections`, `tokens`, `layers`, `statistics`, `ops`.
            run_ids: Of which runs; None means all.

        Returns:
            Columns `run_id`, `case_id` and those of the table, names instead of their indices.
        """
        if table not in TRACE_TABLES:
            raise BadInput(f"table: {table!r} is no trace; use {', '.join(TRACE_TABLES)}")
        ids = None if run_ids is None else list(run_ids)
        condition = "1" if ids is None else f"run_id IN {_LISTED}"
        columns = TRACE_TABLES[table]
        query = (
            f"SELECT run_id, case_id, trace_id, {', '.join(columns)} FROM {table} JOIN traces USING (trace_id)"
            f" WHERE {condition} ORDER BY trace_id, number"
        )
        frame = self._frame(query, () if ids is None else [json.dumps(ids)])
        names = {key: json.loads(text) for key, text in self.connection.execute("SELECT trace_id, names FROM traces")}
        for column in set(columns) & set(NAMED):
            frame[column] = [names[key][at] for key, at in zip(frame["trace_id"], frame[column], strict=True)]
        return frame.drop(columns="trace_id")

    # reading

    def runs(self, where: str = "1", values: Iterable[Any] = ()) -> pd.DataFrame:
        """The runs, newest last; JSON columns parsed.

        Args:
            where: An SQL condition with `?` for values; never built from input.
            values: The values.
        """
        frame = self._frame(f"SELECT * FROM runs WHERE {where} ORDER BY rowid", values)
        return _parse(frame, "params", "versions", "disturbances")

    def runs_of(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """The runs with these ids, newest last."""
        return self.runs(f"run_id IN {_LISTED}", [json.dumps(list(run_ids))])

    def newest_runs(self) -> list[str]:
        """Of each experiment the newest run that is done; where none is, the newest at all."""
        query = (
            "SELECT run_id FROM (SELECT run_id, experiment, row_number()"
            " OVER (PARTITION BY experiment ORDER BY status = ? DESC, rowid DESC) AS place FROM runs)"
            " WHERE place = 1 ORDER BY experiment"
        )
        return [run_id for (run_id,) in self.connection.execute(query, [RunStatus.DONE])]

    def machines(self) -> pd.DataFrame:
        """The machines; JSON columns parsed."""
        return _parse(self._frame("SELECT * FROM machines", ()), "gpus", "dtypes")

    def measurements(
        self, run_ids: Iterable[str] | None = None, *, samples: bool = False, newest: int | None = None
    ) -> pd.DataFrame:
        """The measurements in the order written, each factor as a column `factor.NAME` beside the parsed `factors`.

        Args:
            run_ids: Of which runs; None means all.
            samples: Whether to load all samples (as float64 arrays) too.
            newest: Of a case that several of the runs hold, only the newest on each machine; and of an experiment at most so many
                cases, the newest ones.
        """
        import numpy as np
        import pandas as pd

        columns = [row[1] for row in self.connection.execute("PRAGMA table_info(measurements)")]
        columns = [name for name in columns if samples or name != "samples"]
        ids = None if run_ids is None else list(run_ids)
        condition = "1" if ids is None else f"run_id IN {_LISTED}"
        query = f"SELECT {', '.join(columns)} FROM measurements WHERE {condition} ORDER BY id"
        values: list[Any] = [] if ids is None else [json.dumps(ids)]
        if newest is not None:
            query = _NEWEST.format(columns=", ".join(f"m.{name}" for name in columns), condition=condition)
            values.append(newest)
        frame = self._frame(query, values)
        frame = _parse(frame, "factors", "flags", "details")
        if samples:
            frame["samples"] = [np.frombuffer(blob or b"", dtype="<f8") for blob in frame["samples"]]
        factors = pd.json_normalize(list(frame["factors"]), max_level=0).add_prefix("factor.")
        return pd.concat([frame, factors.set_index(frame.index)], axis=1)

    def shown(self, run_ids: Iterable[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """What a person is shown of runs: the newest cases, with samples, and their runs, as well as the newest that hold none."""
        ids = list(run_ids)
        rows = self.measurements(ids, samples=True, newest=SHOWN_CASES)
        return rows, self.runs_of({*rows["run_id"], *ids[-SHOWN_CASES:]})

    def count_cases(self, run_ids: Iterable[str]) -> int:
        """How many cases the runs hold, counting each once on each machine."""
        query = (
            "SELECT count(*) FROM (SELECT DISTINCT r.machine_id, case_id FROM"
            f" (SELECT DISTINCT run_id, case_id FROM measurements WHERE run_id IN {_LISTED}) JOIN runs r USING (run_id))"
        )
        return _value(self.connection.execute(query, [json.dumps(list(run_ids))]))

    def figures(self, metric: str, machine_ids: Iterable[str], last: int | None = None) -> pd.DataFrame:
        """One metric over the runs of some machines, oldest run first, with what a history needs and nothing more.

        Args:
            metric: Which.
            machine_ids: Of which machines.
            last: Of each experiment on each machine only so many runs, the newest; None means all.

        Returns:
            Columns `run_id`, `started`, `git_revision`, `machine_id`, `experiment`, `case_id`, `factors` (JSON), `scope`, `method`,
            `estimate`, `low`, `high`.
        """
        return self._frame(
            "WITH chosen AS (SELECT run_id, started, git_revision, row_number() OVER"
            " (PARTITION BY machine_id, experiment ORDER BY rowid DESC) AS place"
            f" FROM runs WHERE machine_id IN {_LISTED})"
            " SELECT run_id, started, git_revision, m.machine_id, m.experiment, case_id, factors, scope, method,"
            " estimate, low, high"
            " FROM chosen JOIN measurements m USING (run_id) WHERE place <= ? AND metric = ? AND estimate IS NOT NULL"
            " ORDER BY started, id",
            [json.dumps(list(machine_ids)), 2**60 if last is None else last, metric],
        )

    def runs_before(self, run_ids: Iterable[str], but: str = "") -> list[str]:
        """Of each run the one before it: the last that was done, of the same experiment, suite and machine.

        Args:
            run_ids: Which runs.
            but: An experiment that is left out.
        """
        query = (
            "SELECT before.run_id FROM runs before JOIN runs USING (experiment, suite, machine_id) WHERE runs.run_id = ?"
            " AND experiment != ? AND before.status = 'done' AND before.rowid < runs.rowid"
            " ORDER BY before.rowid DESC LIMIT 1"
        )
        found = (self.connection.execute(query, (run_id, but)) for run_id in run_ids)
        return list(dict.fromkeys(before for rows in found for (before,) in rows))

    def _frame(self, query: str, values: Iterable[Any]) -> pd.DataFrame:
        import pandas as pd

        return pd.read_sql_query(query, self.connection, params=tuple(values))

    def resolve(self, name: str) -> list[str]:
        """Run ids that a name stands for: an id or its beginning, a label, an experiment, a suite, `latest`, `latest~1`.

        `latest` is the latest launch: all runs that one command started.

        Raises:
            BadInput: Nothing goes by that name.
        """
        runs = self.connection.execute(
            "SELECT run_id, label, coalesce(nullif(launch, ''), run_id), experiment, suite FROM runs ORDER BY rowid"
        ).fetchall()
        if name == "all":
            return [run_id for run_id, *_ in runs]
        if name == "latest" or name.startswith("latest~"):
            back = name.removeprefix("latest").removeprefix("~") or "0"
            launches = dict.fromkeys(launch for _, _, launch, *_ in reversed(runs))
            by_place = {str(place): launch for place, launch in enumerate(launches)}
            if back not in by_place:
                raise BadInput(f"run: {name!r} is not there; the database holds {len(launches)} launches")
            return [run_id for run_id, _, launch, *_ in runs if launch == by_place[back]]
        found = [run_id for run_id, label, *_ in runs if label == name and name]
        found = found or [run_id for run_id, _, _, *groups in runs if name and name in groups]
        found = found or [run_id for run_id, *_ in runs if len(name) >= 4 and run_id.startswith(name)]
        if not found:
            raise BadInput(f"run: {name!r} is not in the database; `nano runs` lists what is")
        return found

    def started_attempts(self, run_id: str) -> dict[str, int]:
        """Cases that were started and never ended → how often they were tried."""
        query = "SELECT case_id, details FROM measurements WHERE run_id = ? AND metric = 'case_time' AND status = ?"
        rows = self.connection.execute(query, (run_id, Status.STARTED))
        return {case_id: json.loads(details)["attempts"] for case_id, details in rows}

    def finished_cases(self, run_id: str) -> set[str]:
        """Cases of a run that have ended, however."""
        query = "SELECT case_id FROM measurements WHERE run_id = ? AND metric = 'case_time' AND status != ?"
        return {case_id for (case_id,) in self.connection.execute(query, (run_id, Status.STARTED))}

    def case_endings(self, run_id: str) -> list[tuple[str, int, float]]:
        """How the cases of a run stand: status, how many, seconds inside them."""
        query = "SELECT status, count(*), total(estimate) FROM measurements WHERE run_id = ? AND metric = 'case_time'"
        return self.connection.execute(f"{query} GROUP BY status", (run_id,)).fetchall()

    # moving and tidying

    def merge(self, path: str | Path, run_ids: Iterable[str] | None = None) -> int:
        """Bring in the runs of another database, by run_id; of a run that both hold and neither finished, the cases of both.

        Whichever is merged into which, and how often, the result is the same.

        Args:
            path: The other database.
            run_ids: Only these runs; None means all.

        Returns:
            How many runs came in.

        Raises:
            BadInput: The other database cannot be read.
        """
        with Store(path, create=False) as other:
            if other.path.resolve() == self.path.resolve():
                raise BadInput(f"database: {path} is this database itself; name another")
        self.connection.execute("ATTACH DATABASE ? AS other", (address(Path(path)),))
        try:
            with self._transaction() as db:
                merge_machines(db)
                return merge_runs(db, None if run_ids is None else set(run_ids))
        finally:
            self.connection.execute("DETACH DATABASE other")

    def cleanup_old_runs(
        self, max_age_days: float | None = 30, *, max_runs: int | None = None, dry_run: bool = False
    ) -> list[str]:
        """Delete old runs with all that hangs off them, and give their space back; a run in flight stays.

        Args:
            max_age_days: Those that started longer ago go; None keeps them whatever their age.
            max_runs: So many of the newest stay, those in flight included; None sets no limit.
            dry_run: Only say which.

        Returns:
            Their run_ids, oldest first.

        Raises:
            BadInput: A limit below zero.
        """
        for name, value in (("max_age_days", max_age_days), ("max_runs", max_runs)):
            if value is not None and not value >= 0:
                raise BadInput(f"{name}: {value!r} will not do; give 0 or more")
        query = "SELECT run_id, status, julianday('now') - julianday(started) FROM runs ORDER BY rowid"
        runs = self.connection.execute(query).fetchall()
        kept = len(runs) if max_runs is None else max_runs
        old = [
            run_id
            for place, (run_id, status, age) in enumerate(runs)
            if status != RunStatus.RUNNING
            and ((max_age_days is not None and age > max_age_days) or len(runs) - place > kept)
        ]
        if dry_run or not old:
            return old
        self.commit_transaction()
        with self._transaction() as db:
            db.executemany("DELETE FROM runs WHERE run_id = ?", [(run_id,) for run_id in old])
        # frees a page per step, and `execute` makes a single step of a statement without columns; a script runs to its end
        self.connection.executescript("PRAGMA incremental_vacuum")
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return old

    def copy_to(self, path: str | Path, run_ids: Iterable[str]) -> None:
        """Write these runs to a new database for sharing; it names no process, person, machine or folder.

        Each row is redacted before it is written: what is killed half-way leaves nothing private on the disk either.

        Raises:
            BadInput: The file is there already or cannot be written, or this one cannot be read.
        """
        ids = json.dumps(list(run_ids))
        with new_file(Path(path)) as file, closing(sqlite3.connect(file, isolation_level=None)) as copy:
            copy.execute("PRAGMA auto_vacuum = INCREMENTAL")
            # what fails is deleted, and what is whole is synced once
            copy.execute("PRAGMA journal_mode = OFF").fetchall()
            copy.execute("PRAGMA synchronous = OFF")
            marks = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}"
            copy.executescript(";".join([*MIGRATIONS, marks]))
            copy.execute("BEGIN")
            self.connection.execute("BEGIN")  # one moment's view
            try:
                redaction = Redaction(row["params"] for row in self._rows_of("runs", ["params"], "run_id", ids))
                for (table,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    columns = {row[1]: row[2] for row in copy.execute(f"PRAGMA table_info({table})")}
                    key = next(name for name in _CHOSEN if name in columns)
                    rows = self._rows_of(table, columns, key, ids)
                    told = redaction.rows(rows) if "TEXT" in columns.values() else rows
                    copy.executemany(
                        f"INSERT INTO {table} VALUES ({_marks(len(columns))})", (tuple(row.values()) for row in told)
                    )
            finally:
                self.connection.execute("ROLLBACK")
            copy.execute("COMMIT")

    def _rows_of(self, table: str, columns: Iterable[str], key: str, ids: str) -> Iterator[dict[str, Any]]:
        """Rows of a table that belong to the runs of a JSON list, in the order in which they came."""
        names = list(columns)
        # rows of a trace, by the thousand: a number's column holds numbers, whatever was put there
        by_number = "number" in names
        wanted = [f"iif(typeof({name}) IN ('integer', 'real'), {name}, NULL)" if by_number else name for name in names]
        order = "trace_id, number" if by_number else "rowid"
        query = f"SELECT {', '.join(wanted)} FROM {table} WHERE {_CHOSEN[key]} ORDER BY {order}"
        try:
            for row in self.connection.execute(query, [ids]):
                yield dict(zip(names, row, strict=True))
        except sqlite3.DatabaseError as error:
            raise BadInput(f"database: {self.path} cannot be read ({error}); name another, or copy it again") from None


def _power_row(sample: Any) -> tuple[int, float | None, float | None, float | None, float | None]:
    t_s, watts, joules, low, high = (
        sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
        for name in ("t_s", "watts", "joules", "low", "high")
    )
    if t_s is None or (watts is None and joules is None):
        raise BadInput(f"samples: {sample!r} has no t_s, or neither watts nor joules; give them")
    return round(1e6 * t_s), watts, joules, low, high


def _value(rows: sqlite3.Cursor) -> Any:
    """The only one."""
    ((value,),) = rows
    return value


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "item"):  # a numpy scalar
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _parse(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    for name in columns:
        frame[name] = [json.loads(text) for text in frame[name]]
    return frame


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
