"""One SQLite file: runs, machines, measurements, traces. One transaction per case: a kill loses the case in flight alone."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanolib.measurement import METRICS, BadInput, Measurement, RunStatus, Status
from nanolib.paths import database_path, make_folder
from nanolib.scratch import Scratch
from nanolib.store.checks import BROKEN, COLUMNS, read_row, trace_condition
from nanolib.store.files import address, check_length, writable
from nanolib.store.merging import check_objects, guarded, merge_all
from nanolib.store.needs import lacking
from nanolib.store.schema import APPLICATION_ID, MIGRATIONS, NAMED, REAL, SCHEMA_VERSION, TRACE_TABLES, Run
from nanolib.store.sharing import Redaction, new_file
from nanolib.store.traces import Trace, TraceWriter

if TYPE_CHECKING:
    import pandas as pd


__all__ = ["Run", "Store"]

_WAIT_S, _RETRY_S = 5, 0.02  # for another who writes; between two tries
SHOWN_CASES = 400  # of an experiment, the newest: what a person can still look at, and a browser draw
MOST_BYTES = 1 << 36  # of a database that is merged
_PLACE = "row-{}"  # names a run whose id is broken
_KEPT = (
    "id",
    "run_id",
    "experiment",
    "suite",
    "label",
    "machine_id",
    "case_id",
)  # of a broken row, as far as they can be read
_HAS_RUN = "EXISTS (SELECT 1 FROM runs WHERE runs.run_id = traces.run_id)"
_STEP_ROWS, _STEP_PAGES = 1_000_000, 20_000  # freed at once, a second or two, while others wait
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
        if create and not self.path.exists():
            make_folder(self.path.parent)
        with _opening(self.path, create=create):
            self.connection = sqlite3.connect(address(self.path), timeout=_WAIT_S, isolation_level=None, uri=True)
            self._open()

    def _open(self) -> None:
        execute = self.connection.execute
        version = _version(self.connection, self.path)
        if not writable(self.path):
            if version is None or version < SCHEMA_VERSION:
                raise BadInput(
                    f"database: {self.path} has schema {version or 0}, this nanolib {SCHEMA_VERSION}, and it cannot be written;"
                    " copy it"
                )
            return
        if version is None:
            execute("PRAGMA auto_vacuum = INCREMENTAL")  # only takes hold before the first table
        # A network file system may refuse WAL; the mode in force is asked for, and the classic journal serves as well.
        self.journal_mode = _value(self._patiently("PRAGMA journal_mode = WAL"))
        execute("PRAGMA synchronous = NORMAL" if self.journal_mode == "wal" else "PRAGMA synchronous = FULL")
        execute("PRAGMA foreign_keys = ON")
        if version is None or version < SCHEMA_VERSION:
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
        import pandas as pd

        condition = _HAS_RUN if run_ids is None else f"run_id IN {_LISTED}"
        columns = TRACE_TABLES[table]
        traces = self._checked(
            "traces",
            f"SELECT * FROM traces WHERE {condition} ORDER BY trace_id",
            [] if run_ids is None else [_listed(run_ids)],
        )[0]
        names = {at: traces_row for at, *traces_row in traces.itertuples(index=False)}
        sound = trace_condition(table, columns, NAMED, REAL)
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE trace_id = ? AND {sound} ORDER BY number"
        frames = []
        for trace_id, (run_id, case_id, known) in names.items():
            counts = [len(known)] * len(set(NAMED) & set(columns))
            frame = pd.read_sql_query(query, self.connection, params=(trace_id, *counts))
            for column in set(columns) & set(NAMED):
                frame[column] = [known[at] for at in frame[column]]
            frame.insert(0, "case_id", case_id)
            frame.insert(0, "run_id", run_id)
            frames.append(frame)
        full = [frame for frame in frames if len(frame)]
        return pd.concat(full, ignore_index=True) if full else pd.DataFrame(columns=["run_id", "case_id", *columns])

    # reading

    def runs(self, where: str = "1", values: Iterable[Any] = ()) -> pd.DataFrame:
        """The runs, newest last; JSON columns parsed.

        Args:
            where: An SQL condition with `?` for values; never built from input.
            values: The values.
        """
        frame, wrong = self._checked("runs", f"SELECT rowid, * FROM runs WHERE {where} ORDER BY rowid", values)
        for place, why in wrong.items():
            run_id = frame.loc[place, "run_id"] or _PLACE.format(frame.loc[place, "rowid"])
            told = f"this run is broken: {_which(why)}; nano clean --run {_short(run_id)} removes it"
            frame.loc[place, ["run_id", "status", "message"]] = run_id, BROKEN, told
        return frame.drop(columns="rowid")

    def runs_of(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """The runs with these ids, newest last."""
        return self.runs(f"run_id IN {_LISTED}", [_listed(run_ids)])

    def newest_runs(self) -> list[str]:
        """Of each experiment the newest run that is done; where none is, the newest at all."""
        query = (
            "SELECT run_id FROM (SELECT run_id, experiment, row_number()"
            " OVER (PARTITION BY experiment ORDER BY status = ? DESC, rowid DESC) AS place FROM runs)"
            " WHERE place = 1 ORDER BY experiment"
        )
        return [run_id for (run_id,) in self.connection.execute(query, [RunStatus.DONE])]

    def machines(self) -> pd.DataFrame:
        """The machines; JSON columns parsed. One that runs name and nothing describes says so in `cpu`."""
        import pandas as pd

        frame, wrong = self._checked("machines", "SELECT * FROM machines", ())
        for place, why in wrong.items():
            frame.loc[place, "cpu"] = f"this machine's row is broken: {_which(why)}"
        lost = sorted(set(self.runs()["machine_id"]) - set(frame["machine_id"]))
        if not lost:
            return frame
        told = [
            {"machine_id": name, "cpu": "nothing describes this machine", "gpus": [], "dtypes": {}} for name in lost
        ]
        return pd.concat([frame, pd.DataFrame(told, columns=frame.columns)], ignore_index=True)

    def measurements(
        self,
        run_ids: Iterable[str] | None = None,
        *,
        samples: bool = False,
        newest: int | None = None,
        whole: bool = False,
    ) -> pd.DataFrame:
        """The measurements in the order written, each factor as a column `factor.NAME` beside the parsed `factors`.

        Args:
            run_ids: Of which runs; None means all.
            samples: Whether to load all samples (as float64 arrays) too.
            newest: Of a case that several of the runs hold, only the newest on each machine; and of an experiment at most so many
                cases, the newest ones.
            whole: Whether a row that lacks what charts and tables rely on is shown as broken too.
        """
        import numpy as np
        import pandas as pd

        columns = [row[1] for row in self.connection.execute("PRAGMA table_info(measurements)")]
        columns = [name for name in columns if samples or name != "samples"]
        ids = None if run_ids is None else list(run_ids)
        condition = "1" if ids is None else f"run_id IN {_LISTED}"
        query = f"SELECT {', '.join(columns)} FROM measurements WHERE {condition} ORDER BY id"
        values: list[Any] = [] if ids is None else [_listed(ids)]
        if newest is not None:
            query = _NEWEST.format(columns=", ".join(f"m.{name}" for name in columns), condition=condition)
            values.append(newest)
        frame, wrong = self._checked("measurements", query, values)
        if whole:
            lack = {place: lacking(row) for place, row in enumerate(frame.to_dict("records")) if place not in wrong}
            wrong |= {place: why for place, why in lack.items() if why}
        for place, why in wrong.items():
            row = frame.loc[place]
            told = f"row {row['id']} is broken: {_which(why)}; nano clean --run {_short(row['run_id'])} removes its run"
            kept = {name: row[name] for name in _KEPT}
            told = kept | {
                "metric": "case_time",
                "unit": "s",
                "method": BROKEN,
                "status": Status.ERROR.value,
                "message": told,
            }
            for name in frame.columns:
                frame.at[place, name] = told[name] if name in told else COLUMNS["measurements"][name].instead()
        if samples:
            frame["samples"] = [np.frombuffer(blob or b"", dtype="<f8") for blob in frame["samples"]]
        factors = pd.json_normalize(list(frame["factors"]), max_level=0).add_prefix("factor.")
        return pd.concat([frame, factors.set_index(frame.index)], axis=1)

    def shown(self, run_ids: Iterable[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """What a person is shown of runs: the newest cases, with samples, and their runs, as well as the newest that hold none."""
        ids = list(run_ids)
        rows = self.measurements(ids, samples=True, newest=SHOWN_CASES, whole=True)
        return rows, self.runs_of({*rows["run_id"], *ids[-SHOWN_CASES:]})

    def count_cases(self, run_ids: Iterable[str]) -> int:
        """How many cases the runs hold, counting each once on each machine."""
        query = (
            "SELECT count(*) FROM (SELECT DISTINCT r.machine_id, case_id FROM"
            f" (SELECT DISTINCT run_id, case_id FROM measurements WHERE run_id IN {_LISTED}) JOIN runs r USING (run_id))"
        )
        return _value(self.connection.execute(query, [_listed(run_ids)]))

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
        query = (
            "WITH chosen AS (SELECT run_id, started, git_revision, row_number() OVER"
            " (PARTITION BY machine_id, experiment ORDER BY rowid DESC) AS place"
            f" FROM runs WHERE machine_id IN {_LISTED})"
            " SELECT run_id, started, git_revision, m.machine_id, m.experiment, case_id, factors, scope, method,"
            " estimate, low, high"
            " FROM chosen JOIN measurements m USING (run_id) WHERE place <= ? AND metric = ? AND estimate IS NOT NULL"
            " ORDER BY started, id"
        )
        frame, wrong = self._checked("figures", query, [_listed(machine_ids), 2**60 if last is None else last, metric])
        return frame.drop(index=list(wrong)).reset_index(drop=True)

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

    def _checked(self, table: str, query: str, values: Iterable[Any]) -> tuple[pd.DataFrame, dict[int, str]]:
        """What the rows stand for, JSON parsed; and what is wrong with those that are broken, by their place."""
        import pandas as pd

        cursor = self.connection.execute(query, tuple(values))
        names = [column[0] for column in cursor.description]
        read = [read_row(table, names, row) for row in cursor]
        frame = pd.DataFrame.from_records([row for row, _ in read], columns=names, coerce_float=True)
        return frame, {place: wrong for place, (_, wrong) in enumerate(read) if wrong}

    def resolve(self, name: str) -> list[str]:
        """Run ids that a name stands for: an id or its beginning, a label, an experiment, a suite, `latest`, `latest~1`.

        `latest` is the latest launch: all runs that one command started.

        Raises:
            BadInput: Nothing goes by that name.
        """
        query = "SELECT rowid, run_id, label, coalesce(nullif(launch, ''), run_id), experiment, suite FROM runs ORDER BY rowid"
        runs = [(_run_name(place, run_id), *rest) for place, run_id, *rest in self.connection.execute(query).fetchall()]
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
        found = found or [run_id for run_id, *_ in runs if name and run_id == name]
        found = found or [run_id for run_id, *_ in runs if len(name) >= 4 and run_id.startswith(name)]
        if not found:
            raise BadInput(f"run: {name!r} is not in the database; `nano runs` lists what is")
        return found

    def started_attempts(self, run_id: str) -> dict[str, int]:
        """Cases that were started and never ended → how often they were tried."""
        query = "SELECT case_id, details FROM measurements WHERE run_id = ? AND metric = 'case_time' AND status = ?"
        rows, wrong = self._checked("measurements", query, (run_id, Status.STARTED))
        rows = rows.drop(index=list(wrong))
        return {
            case_id: details.get("attempts", 1)
            for case_id, details in zip(rows["case_id"], rows["details"], strict=True)
        }

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
            BadInput: The other database cannot be read, or holds what this program does not write; nothing comes in then.
        """
        chosen = None if run_ids is None else set(run_ids)
        check_mergeable(Path(path), self.path)
        with _migrated(Path(path)) as source:
            self.connection.execute("ATTACH DATABASE ? AS other", (address(source),))
            try:
                with _of_database(Path(path)), self._transaction() as db, guarded(db, source.stat().st_size):
                    return merge_all(db, chosen)
            finally:
                self.connection.execute("DETACH DATABASE other")

    def cleanup_old_runs(
        self,
        max_age_days: float | None = 30,
        *,
        max_runs: int | None = None,
        run_ids: Collection[str] = (),
        dry_run: bool = False,
    ) -> list[str]:
        """Delete old runs with all that hangs off them, and give their space back; a run in flight stays.

        Args:
            max_age_days: Those that started longer ago go; None keeps them whatever their age.
            max_runs: So many of the newest stay, those in flight included; None sets no limit.
            run_ids: These go too, however old; `resolve` gives them.
            dry_run: Only say which.

        Returns:
            Their run_ids, oldest first.

        Raises:
            BadInput: A limit below zero, or one of `run_ids` is in flight.
        """
        for name, value in (("max_age_days", max_age_days), ("max_runs", max_runs)):
            if value is not None and not value >= 0:
                raise BadInput(f"{name}: {value!r} will not do; give 0 or more")
        query = "SELECT rowid, run_id, status, julianday('now') - julianday(started) FROM runs ORDER BY rowid"
        runs = [(at, _run_name(at, run_id), *rest) for at, run_id, *rest in self.connection.execute(query).fetchall()]
        kept = len(runs) if max_runs is None else max_runs
        for _, run_id, status, _ in runs:
            if run_id in run_ids and status == RunStatus.RUNNING:
                raise BadInput(f"run: {_short(run_id)} is in flight; stop it first")
        old = {
            at: run_id
            for place, (at, run_id, status, age) in enumerate(runs)
            if status != RunStatus.RUNNING
            and (
                (max_age_days is not None and age is not None and age > max_age_days)
                or len(runs) - place > kept
                or run_id in run_ids
            )
        }
        if not dry_run:
            self.commit_transaction()
            self._delete(old)
        return list(old.values())

    def _delete(self, places: Iterable[int]) -> None:
        """Delete runs by their places in the table; what is left of runs that are gone follows, part by part.

        All go at once, in a moment: their rows over time, which nobody sees without their run, are freed afterwards, in steps
        between which others can write. A kill leaves the rest to the next call.
        """
        db = self.connection
        db.execute("PRAGMA foreign_keys = OFF")  # deletes what hangs off a row one by one, in thrice the time
        try:
            with self._transaction():
                for place in places:
                    of_run = f"(SELECT run_id FROM runs WHERE rowid = ? AND status IS NOT '{RunStatus.RUNNING}')"
                    db.execute(f"DELETE FROM measurements WHERE run_id = {of_run}", (place,))
                    db.execute(f"DELETE FROM runs WHERE rowid = ? AND status IS NOT '{RunStatus.RUNNING}'", (place,))
            lost = [at for (at,) in db.execute(f"SELECT trace_id FROM traces WHERE NOT {_HAS_RUN} ORDER BY trace_id")]
            for table in TRACE_TABLES if lost else ():
                self._free(table, lost)
            with self._transaction():
                db.executemany("DELETE FROM traces WHERE trace_id = ?", [(at,) for at in lost])
        finally:
            db.execute("PRAGMA foreign_keys = ON")
        self._shrink()

    def _free(self, table: str, lost: Sequence[int]) -> None:
        """Free the rows of traces whose run is gone; where they are most of the table, what stays is written anew instead."""
        db = self.connection
        last = f"SELECT trace_id, (SELECT max(number) FROM {table} t WHERE t.trace_id = traces.trace_id) FROM traces"
        counts = {at: 1 + number for at, number in db.execute(last) if isinstance(number, int)}
        gone = {at: counts[at] for at in lost if at in counts}
        if sum(gone.values()) > 4 * (sum(counts.values()) - sum(gone.values())):
            with self._transaction():
                of_run = f"SELECT trace_id FROM traces WHERE {_HAS_RUN}"
                db.execute(f"CREATE TEMP TABLE kept AS SELECT * FROM {table} WHERE trace_id IN ({of_run})")
                db.execute(f"DELETE FROM main.{table}")  # without a condition it frees page by page
                db.execute(f"INSERT INTO main.{table} SELECT * FROM temp.kept")
                db.execute("DROP TABLE temp.kept")
            return
        for at, count in gone.items():
            for end in range(_STEP_ROWS, count + _STEP_ROWS, _STEP_ROWS):
                with self._transaction():
                    db.execute(f"DELETE FROM {table} WHERE trace_id = ? AND number < ?", (at, end))

    def _shrink(self) -> None:
        """Give free pages back to the disk: by writing the file anew where they are most of it, else in steps."""
        db = self.connection
        free, pages = (_value(db.execute(f"PRAGMA {name}")) for name in ("freelist_count", "page_count"))
        if free > pages / 2:
            db.execute("VACUUM")
        for _ in range(0, 0 if free > pages / 2 else free, _STEP_PAGES):
            # frees a page per step, and `execute` makes a single step of a statement without columns; a script runs to its end
            db.executescript(f"PRAGMA incremental_vacuum({_STEP_PAGES})")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

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


@contextmanager
def _opening(path: Path, *, create: bool = False) -> Iterator[None]:
    """Around what opens a file: one that is not there, empty, cut off or damaged is told."""
    if not path.exists():
        if not create:
            raise BadInput(f"database: {path} does not exist; run `nano run quick` first or name another")
    elif not create and not path.stat().st_size:
        raise BadInput(f"database: {path} is empty; name another")
    try:
        check_length(path)
        yield
    except sqlite3.DatabaseError as error:
        raise BadInput(f"database: {path} cannot be opened ({error}); name another, or move it away") from None


def _version(connection: sqlite3.Connection, path: Path) -> int | None:
    """Which schema an opened file has; None where there is nothing in it yet.

    Raises:
        BadInput: It is not ours, or newer than this version.
    """
    execute = connection.execute
    connection.text_factory = _decoded
    execute(f"PRAGMA busy_timeout = {1000 * _WAIT_S}")
    execute("PRAGMA trusted_schema = OFF")
    execute("BEGIN")  # one moment's view: another process may be making the same file
    version = _value(execute("PRAGMA user_version"))
    application = _value(execute("PRAGMA application_id"))
    empty = not _value(execute("SELECT count(*) FROM sqlite_master"))
    execute("COMMIT")
    if not empty and application != APPLICATION_ID:
        raise BadInput(f"database: {path} is not nanolib's; name another")
    if version > SCHEMA_VERSION:
        raise BadInput(
            f"database: {path} has schema {version}, newer than this nanolib's {SCHEMA_VERSION}; update nanolib"
        )
    return None if empty else version


def _decoded(text: bytes) -> str:
    """Text whatever its bytes are: what is no UTF-8 is found by whoever looks at the row."""
    return text.decode("utf-8", "surrogateescape")


def check_mergeable(path: Path, into: Path) -> None:
    """Whether a file is a database whose runs can be brought into another; nothing is written to it.

    Raises:
        BadInput: It is missing, not ours, newer, damaged, too large, the same file, or holds what nanolib does not make.
    """
    with _opening(path), closing(_reading(path)) as other:
        version = _version(other, path)
        if path.resolve() == into.resolve():
            raise BadInput(f"database: {path} is this database itself; name another")
        if path.stat().st_size > MOST_BYTES:
            raise BadInput(f"database: {path} is larger than {MOST_BYTES >> 30} GiB; name another")
        with _of_database(path):
            check_objects(other, "main", version or 0)


def _reading(path: Path) -> sqlite3.Connection:
    """Opened for a look: nothing is written. Read-only, a journal of its own would be left beside the file."""
    connection = sqlite3.connect(address(path), timeout=_WAIT_S, isolation_level=None, uri=True)
    connection.execute("PRAGMA query_only = ON")
    return connection


@contextmanager
def _of_database(path: Path) -> Iterator[None]:
    """What is found wrong in a file is told of it."""
    try:
        yield
    except BadInput as error:
        raise BadInput(
            f"database: {path}: {error}; nothing was merged; leave that run out (nano clean --run there), or name another"
        ) from None


@contextmanager
def _migrated(path: Path) -> Iterator[Path]:
    """A database of this version with what the file holds: the file itself, or a copy of an older one."""
    with closing(_reading(path)) as other, Scratch("merge") as scratch:
        if _version(other, path) == SCHEMA_VERSION:
            yield path
            return
        copy = scratch.path / "copy.sqlite"
        with closing(sqlite3.connect(copy)) as connection:
            other.backup(connection)
        Store(copy).close()
        yield copy


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


def _listed(names: Iterable[Any]) -> str:
    """Names for a query, as JSON; what is no text is the name of nothing."""
    return json.dumps([name for name in names if isinstance(name, str)])


def _which(wrong: str) -> str:
    """What of a row is wrong, without the value: that may tell what an export must not."""
    return f"its {wrong.partition(':')[0]} is not what nanolib writes"


def _run_name(place: int, run_id: Any) -> str:
    """The id of a run; where it is broken, its place in the table."""
    return read_row("runs", ["run_id"], [run_id])[0][0] or _PLACE.format(place)


def _short(run_id: str) -> str:
    """As much of an id as names its run; one that is no single word may tell what an export must not."""
    if not re.fullmatch(r"[\w-]{1,64}", run_id):
        return "ID"
    return run_id[:8] if len(run_id) == 36 else run_id


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
