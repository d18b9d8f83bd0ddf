"""One SQLite file: runs, machines, measurements, traces. One transaction per case: a kill loses the case in flight alone."""

from __future__ import annotations

import secrets
import sqlite3
import struct
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanolib.measurement import METRICS, MOST_LABEL, BadInput, Measurement, RunStatus, shown
from nanolib.store.connection import unusable
from nanolib.store.identity import gone
from nanolib.store.query import Reader, listed
from nanolib.store.schema import LISTED, TRACE_TABLES, Run, as_json, marks
from nanolib.store.traces import Trace, TraceWriter

__all__ = ["Run", "Store"]

# Of two copies of a run the greater one stays: one that is done, then the fuller one.
_RANK = (
    "({run}.status = 'done',"
    " (SELECT count(*) FROM {schema}.measurements m WHERE m.run_id = {run}.run_id"
    " AND metric = 'case_time' AND status != 'started'),"
    " (SELECT count(*) FROM {schema}.measurements m WHERE m.run_id = {run}.run_id))"
)


class Store(Reader):
    """The results in one file.

    Args:
        path: The database; made if it is missing, together with its folder.
        create: Whether a missing file is made.

    Raises:
        BadInput: The file is missing (with `create=False`), is no database, not ours, of another version of nanolib, or locked.

    Example:
        >>> with Store("results.sqlite") as store:
        ...     len(store.runs())
        0
    """

    def __init__(self, path: str | Path | None = None, *, create: bool = True) -> None:
        self._writer: TraceWriter | None = None
        self._traces: dict[tuple[str, str], Trace] = {}
        super().__init__(path, create=create)

    def close(self) -> None:
        """Close the file; traces on their way are written first."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        super().close()

    def add(self, run: Run) -> str:
        """Add a run.

        Without rows it is `running`; one that brings its rows along is `done`.

        Returns:
            Its run_id.

        Raises:
            BadInput: Its label or suite is too long, or the file cannot be written.
        """
        _check_names({"label": run.label, "suite": run.suite})
        names = (
            "machine_id",
            "cpu",
            "cores",
            "ram_gib",
            "system",
            "driver",
            "torch",
            "threads",
            "governor",
        )
        machine = {name: run.machine.get(name) for name in names}
        machine |= {
            "gpus": as_json(run.machine.get("gpus", [])),
            "dtypes": as_json(run.machine.get("dtypes", {})),
        }
        known = ", ".join(f"{name} = excluded.{name}" for name in machine)
        with self.transaction() as db:
            _insert(db, "machines", machine, f" ON CONFLICT (machine_id) DO UPDATE SET {known}")
            _insert(
                db,
                "runs",
                {
                    "run_id": run.run_id,
                    "experiment": run.experiment,
                    "suite": run.suite,
                    "label": run.label,
                    "machine_id": machine["machine_id"],
                    "device": run.device,
                    "params": as_json(run.params),
                    "versions": as_json(run.versions),
                    "git_revision": run.git_revision,
                    "fingerprint": run.fingerprint,
                    "cases": run.cases or len(run.rows),
                    "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
                    "duration_s": None,
                    "status": RunStatus.DONE if run.rows else RunStatus.RUNNING,
                    "message": "",
                    "process": run.process,
                    "launch": run.launch,
                    "disturbances": as_json(list(run.disturbances)),
                },
            )
            for case_id, (factors, measurements) in run.rows.items():
                self._write_case(db, run.run_id, case_id, factors, measurements)
        return run.run_id

    def write_case(
        self,
        run_id: str,
        case_id: str,
        factors: Mapping[str, Any],
        measurements: Iterable[Measurement],
    ) -> None:
        """Replace all rows of one case, in one transaction."""
        self.write_cases(run_id, {case_id: (factors, measurements)})

    def write_cases(
        self, run_id: str, cases: Mapping[str, tuple[Mapping[str, Any], Iterable[Measurement]]]
    ) -> None:
        """Replace all rows of several cases, in one transaction: id → factors and measurements."""
        with self.transaction() as db:
            for case_id, (factors, measurements) in cases.items():
                db.execute(
                    "DELETE FROM measurements WHERE run_id = ? AND case_id = ?", (run_id, case_id)
                )
                self._write_case(db, run_id, case_id, factors, measurements)

    @staticmethod
    def _write_case(
        db: sqlite3.Connection,
        run_id: str,
        case_id: str,
        factors: Mapping[str, Any],
        measurements: Iterable[Measurement],
    ) -> None:
        if not db.execute("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)).fetchone():
            raise BadInput(f"run: {run_id} is not in the database; add it first")
        for m in measurements:
            _insert(
                db,
                "measurements",
                {
                    "run_id": run_id,
                    "case_id": case_id,
                    "factors": as_json(factors),
                    "metric": m.metric,
                    "scope": m.scope,
                    "unit": METRICS[m.metric].unit,
                    "estimate": m.estimate,
                    "low": m.low,
                    "high": m.high,
                    "confidence": m.confidence,
                    "n": m.n,
                    "samples": struct.pack(f"<{len(m.samples)}d", *m.samples),
                    "predicted": m.predicted,
                    "provenance": m.provenance,
                    "method": m.method,
                    "status": m.status,
                    "message": m.message,
                    "flags": as_json(m.flags),
                    "details": as_json(m.details),
                },
            )

    def update_run(self, run_id: str, **values: Any) -> None:
        """Set columns of a run by name, such as `status` and `message`."""
        allowed = {
            "status",
            "message",
            "duration_s",
            "process",
            "launch",
            "cases",
            "label",
            "suite",
            "disturbances",
        }
        if unknown := set(values) - allowed:
            raise BadInput(
                f"run: {', '.join(sorted(unknown))} cannot be set; only {', '.join(sorted(allowed))} can"
            )
        _check_names(values)
        settings = ", ".join(f"{name} = ?" for name in values)
        values = {
            name: as_json(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        with self.transaction() as db:
            db.execute(f"UPDATE runs SET {settings} WHERE run_id = ?", (*values.values(), run_id))

    def new_trace(self, run_id: str, case_id: str) -> Trace:
        """Begin an empty trace of a case, in place of an earlier try's.

        Raises:
            BadInput: There is no such run.
        """
        with self.transaction() as db:
            if db.execute("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)).fetchone() is None:
                raise BadInput(f"run: {run_id} is not in the database; add it first")
            db.execute("DELETE FROM traces WHERE run_id = ? AND case_id = ?", (run_id, case_id))
            trace_id = secrets.randbits(63)
            _insert(
                db,
                "traces",
                {"trace_id": trace_id, "run_id": run_id, "case_id": case_id, "names": "[]"},
            )
        self._writer = self._writer or TraceWriter(self.path)
        return Trace(self._writer, trace_id)

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
        rows = [
            _power_row(sample) for sample in samples
        ]  # all are looked at before any is taken in
        trace = self._trace(run_id, case_id)
        name = trace.name(source)
        trace.put("power_samples", [(name, *row) for row in rows])

    def _trace(self, run_id: str, case_id: str) -> Trace:
        run_id = run_id or self.resolve("latest")[-1]
        if (run_id, case_id) not in self._traces:
            self._traces[run_id, case_id] = self.new_trace(run_id, case_id)
        return self._traces[run_id, case_id]

    def commit_transaction(self) -> None:
        """Wait until every queued row of a trace is committed.

        Raises:
            BadInput: Some could not be written.
        """
        if self._writer is not None and (failure := self._writer.flush()):
            raise BadInput(
                f"traces: some rows of {self.path} could not be written ({failure}); free space, or name another"
            )

    def merge(self, path: str | Path) -> int:
        """Bring in the runs of another database, by run_id; twice changes nothing.

        Of a run that both have, a copy that is done stays before one that is not, and then the one with more finished cases.

        Args:
            path: The other database.

        Returns:
            How many runs came in.

        Raises:
            BadInput: The other database is missing, is this one, or holds what nanolib would not write; nothing comes in then.
        """
        check_mergeable(path, self.path)
        self.connection.execute("ATTACH DATABASE ? AS other", (str(path),))
        try:
            with self.transaction() as db:
                return self._merge_attached(db)
        except sqlite3.DatabaseError as error:
            raise BadInput(
                f"database: {path} cannot be merged ({error}); nothing came in; name another"
            ) from None
        finally:
            self.connection.execute("DETACH DATABASE other")

    @staticmethod
    def _merge_attached(db: sqlite3.Connection) -> int:
        ours, theirs = (
            _RANK.format(schema=schema, run=run) for schema, run in (("main", "r"), ("other", "o"))
        )
        query = (
            "SELECT o.run_id FROM other.runs o LEFT JOIN main.runs r USING (run_id)"
            f" WHERE r.run_id IS NULL OR {theirs} > {ours} ORDER BY o.rowid"
        )
        taken = [run_id for (run_id,) in db.execute(query)]
        columns = [
            row[1] for row in db.execute("PRAGMA main.table_info(measurements)") if row[1] != "id"
        ]
        of_measurements = ", ".join(columns)
        db.execute("INSERT OR IGNORE INTO main.machines SELECT * FROM other.machines")
        for run_id in taken:
            place = db.execute("SELECT rowid FROM main.runs WHERE run_id = ?", (run_id,)).fetchone()
            db.execute(
                "DELETE FROM main.runs WHERE run_id = ?", (run_id,)
            )  # and all that hangs off it
            for table, names in (("runs", "*"), ("measurements", of_measurements), ("traces", "*")):
                into = "" if names == "*" else f"({names})"
                db.execute(
                    f"INSERT INTO main.{table} {into} SELECT {names} FROM other.{table} WHERE run_id = ? ORDER BY rowid",
                    (run_id,),
                )
            for table in TRACE_TABLES:
                db.execute(
                    f"INSERT INTO main.{table} SELECT * FROM other.{table}"
                    " WHERE trace_id IN (SELECT trace_id FROM other.traces WHERE run_id = ?)",
                    (run_id,),
                )
            if place:  # what was here stays where it was among the others
                db.execute("UPDATE main.runs SET rowid = ? WHERE run_id = ?", (*place, run_id))
        return len(taken)

    def mark_dead_runs(self) -> None:
        """Runs that say `running` though their process is gone become `interrupted`."""
        query = "SELECT run_id, process FROM runs WHERE status = 'running'"
        for run_id, process in self.connection.execute(query).fetchall():
            if gone(process):
                self.update_run(
                    run_id,
                    status=RunStatus.INTERRUPTED,
                    message="its process ended before the run did",
                )

    def cleanup_old_runs(
        self,
        max_age_days: float | None = 30,
        *,
        max_runs: int | None = None,
        run_ids: Collection[str] = (),
        dry_run: bool = False,
    ) -> list[str]:
        """Delete old runs, and give their space back; a run in flight stays.

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
        runs = self.runs()
        in_flight = runs["status"] == RunStatus.RUNNING
        named = runs["run_id"].isin(list(run_ids))
        for run_id in runs.loc[in_flight & named, "run_id"]:
            raise BadInput(f"run: {run_id[:8]} is in flight; stop it first")
        limit = "" if max_age_days is None else self._moment(max_age_days)
        beyond = len(runs) - (len(runs) if max_runs is None else max_runs)
        old = named | (runs["started"] < limit) | (runs.index < beyond)
        chosen = list(runs.loc[old & ~in_flight, "run_id"])
        if not dry_run:
            self.commit_transaction()
            self.mark_dead_runs()
            with self.transaction() as db:
                db.execute(f"DELETE FROM runs WHERE run_id IN {LISTED}", (listed(chosen),))
            try:
                self.connection.execute("VACUUM")
                self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.OperationalError as error:
                raise BadInput(unusable(self.path, error)) from error
        return chosen

    def _moment(self, days_ago: float) -> str:
        """A moment as `started` has it; before all of them where there is no such day."""
        return self.connection.execute(
            "SELECT coalesce(strftime('%Y-%m-%dT%H:%M:%f', 'now', ?), '')", (f"-{days_ago} days",)
        ).fetchone()[0]


def check_mergeable(path: str | Path, into: Path) -> None:
    """Check that a file is a database of this version, and another one.

    Raises:
        BadInput: It is not.

    Example:
        >>> from pathlib import Path
        >>> check_mergeable("colleague.sqlite", Path("results.sqlite"))
        Traceback (most recent call last):
        nanolib.measurement.BadInput: ...colleague.sqlite...
    """
    with Reader(path, create=False) as other:
        if other.path.resolve() == into.resolve():
            raise BadInput(f"database: {path} is this database itself; name another")


def _insert(
    db: sqlite3.Connection, table: str, row: Mapping[str, Any], on_conflict: str = ""
) -> None:
    db.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks(len(row))}){on_conflict}",
        list(row.values()),
    )


def _power_row(sample: Any) -> tuple[int, float | None, float | None, float | None, float | None]:
    t_s, watts, joules, low, high = (
        sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
        for name in ("t_s", "watts", "joules", "low", "high")
    )
    if t_s is None or (watts is None and joules is None):
        raise BadInput(f"samples: {sample!r} has no t_s, or neither watts nor joules; give them")
    return round(1e6 * t_s), watts, joules, low, high


def _check_names(values: Mapping[str, Any]) -> None:
    for name in {"label", "suite"} & values.keys():
        if len(values[name]) > MOST_LABEL:
            raise BadInput(
                f"run: {name} {shown(values[name])} will not do; give at most {MOST_LABEL} characters"
            )
