"""One SQLite file: runs, machines, measurements, traces. One transaction per case: a kill loses the case in flight alone."""

from __future__ import annotations

import math
import sqlite3
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanolib.measurement import METRICS, MOST_LABEL, BadInput, Measurement, RunStatus, shown
from nanolib.store.connection import WAIT_S, check_version, open_for_reading, opening
from nanolib.store.copying import write_copy
from nanolib.store.deleting import delete_runs, old_runs
from nanolib.store.files import address
from nanolib.store.identity import gone
from nanolib.store.merging import merge_all
from nanolib.store.reading import Reader
from nanolib.store.schema import Run, as_json, marks
from nanolib.store.traces import Trace, TraceWriter

__all__ = ["Run", "Store"]


class Store(Reader):
    """The results in one file.

    Args:
        path: The database; made if it is missing, together with its folder.
        create: Whether a missing file, or an empty one, may be made into a database.
        wait_s: How long to wait while another program has the file locked, in seconds.

    A file that cannot be written, or whose folder cannot, is read as it is.

    Raises:
        BadInput: The file is missing or empty (with `create=False`), is no database, not ours, of another version of
            nanolib, locked, or damaged.

    Example:
        >>> with Store("results.sqlite") as store:
        ...     len(store.runs())
        0
    """

    def __init__(self, path: str | Path | None = None, *, create: bool = True, wait_s: float = WAIT_S) -> None:
        self._writer: TraceWriter | None = None
        self._traces: dict[tuple[str, str], Trace] = {}
        super().__init__(path, create=create, wait_s=wait_s)

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
        machine = dict(run.machine)
        status = RunStatus.DONE if run.rows else RunStatus.RUNNING
        with self.transaction() as db:
            columns = ("machine_id", "cpu", "cores", "ram_gib", "system", "driver", "torch", "threads", "governor")
            values = [machine.get(name) for name in columns]
            db.execute(
                f"INSERT OR REPLACE INTO machines ({', '.join(columns)}, gpus, dtypes) VALUES ({marks(11)})",
                [*values, as_json(machine.get("gpus", [])), as_json(machine.get("dtypes", {}))],
            )
            db.execute(
                f"INSERT INTO runs VALUES ({marks(18)})",
                (
                    run.run_id,
                    run.experiment,
                    run.suite,
                    run.label,
                    machine["machine_id"],
                    run.device,
                    as_json(run.params),
                    as_json(run.versions),
                    run.git_revision,
                    run.fingerprint,
                    run.cases or len(run.rows),
                    _now(),
                    None,
                    status,
                    "",
                    run.process,
                    run.launch,
                    as_json(list(run.disturbances)),
                ),
            )
            for case_id, (factors, measurements) in run.rows.items():
                self._write_case(db, run.run_id, case_id, factors, measurements)
        return run.run_id

    def write_case(
        self, run_id: str, case_id: str, factors: Mapping[str, Any], measurements: Iterable[Measurement]
    ) -> None:
        """Replace all rows of one case, in one transaction."""
        self.write_cases(run_id, {case_id: (factors, measurements)})

    def write_cases(self, run_id: str, cases: Mapping[str, tuple[Mapping[str, Any], Iterable[Measurement]]]) -> None:
        """Replace all rows of several cases, in one transaction: id → factors and measurements."""
        with self.transaction() as db:
            for case_id, (factors, measurements) in cases.items():
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
            f" VALUES ({marks(23)})",
            [
                (
                    run_id,
                    *run,
                    case_id,
                    as_json(factors),
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
                    as_json(m.flags),
                    as_json(m.details),
                )
                for m in measurements
            ],
        )

    def update_run(self, run_id: str, **values: Any) -> None:
        """Set columns of a run by name, such as `status` and `message`."""
        allowed = {"status", "message", "duration_s", "process", "launch", "cases", "label", "suite", "disturbances"}
        if unknown := set(values) - allowed:
            raise BadInput(f"run: {', '.join(sorted(unknown))} cannot be set; only {', '.join(sorted(allowed))} can")
        _check_names(values)
        settings = ", ".join(f"{name} = ?" for name in values)
        values = {name: as_json(value) if isinstance(value, list) else value for name, value in values.items()}
        with self.transaction() as db:
            db.execute(f"UPDATE runs SET {settings} WHERE run_id = ?", (*values.values(), run_id))
            for name in {"label", "suite"} & set(values):  # which each row has too
                db.execute(f"UPDATE measurements SET {name} = ? WHERE run_id = ?", (values[name], run_id))

    def new_trace(self, run_id: str, case_id: str) -> Trace:
        """Begin an empty trace of a case, in place of an earlier try's.

        Raises:
            BadInput: There is no such run.
        """
        with self.transaction() as db:
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
        rows = [_power_row(sample) for sample in samples]  # all are looked at before any is taken in
        trace = self._trace(run_id, case_id)
        name = trace.name(source)
        trace.put("power_samples", [(name, *row) for row in rows])

    def add_power_sample(
        self, sample: Any = None, *, run_id: str = "", case_id: str = "", source: str = "power", **fields: Any
    ) -> None:
        """Queue one power sample: as `add_power_samples` takes it, or by its fields (`t_s`, `watts`, `joules`)."""
        self.add_power_samples([fields if sample is None else sample], run_id=run_id, case_id=case_id, source=source)

    def add_section(self, name: str, start_s: float, end_s: float, *, run_id: str = "", case_id: str = "") -> None:
        """Queue a section of a run's time; `commit_transaction` waits until it is written.

        Args:
            name: What ran.
            start_s: When it began, by the clock of the power samples.
            end_s: When it ended.
            run_id: Of which run; the newest by default.
            case_id: Of which case.

        Raises:
            BadInput: No such run, or a section that ends before it begins.
        """
        if not (math.isfinite(start_s) and math.isfinite(end_s) and end_s >= start_s):
            raise BadInput(f"section: {name!r} ends at {end_s} and begins at {start_s}; give the later moment last")
        trace = self._trace(run_id, case_id)
        trace.put("sections", [(trace.name(name), round(1e6 * start_s), round(1e9 * (end_s - start_s)))])

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

    def merge(self, path: str | Path, run_ids: Iterable[str] | None = None) -> int:
        """Bring in the runs of another database, by run_id.

        Of a run that both hold and neither finished, the cases of both are kept.

        Whichever is merged into which, and how often, the result is the same.

        Args:
            path: The other database.
            run_ids: Only these runs; None means all.

        Returns:
            How many runs came in.

        Raises:
            BadInput: The other database cannot be read, or its tables are not nanolib's; nothing comes in then.
        """
        chosen = None if run_ids is None else set(run_ids)
        check_mergeable(Path(path), self.path)
        self.connection.execute("ATTACH DATABASE ? AS other", (address(Path(path)),))
        try:
            with self.transaction() as db, _of_database(Path(path), db):
                return merge_all(db, chosen)
        finally:
            self.connection.execute("DETACH DATABASE other")

    def mark_dead_runs(self) -> None:
        """Runs that say `running` though their process is gone become `interrupted`."""
        for run_id, process in self.connection.execute(
            "SELECT run_id, process FROM runs WHERE status = 'running'"
        ).fetchall():
            if gone(str(process), self.path):
                self.update_run(run_id, status=RunStatus.INTERRUPTED, message="its process ended before the run did")

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
        old = old_runs(self, max_age_days, max_runs, run_ids)
        if not dry_run:
            self.commit_transaction()
            self.mark_dead_runs()
            delete_runs(self, old)
        return old

    def copy_to(self, path: str | Path, run_ids: Iterable[str]) -> None:
        """Write runs to a new database for sharing.

        It names no process, person, machine or folder.

        Raises:
            BadInput: The file is there already or cannot be written, or this one cannot be read.
        """
        write_copy(self, Path(path), run_ids)


def _power_row(sample: Any) -> tuple[int, float | None, float | None, float | None, float | None]:
    t_s, watts, joules, low, high = (
        sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
        for name in ("t_s", "watts", "joules", "low", "high")
    )
    if t_s is None or (watts is None and joules is None):
        raise BadInput(f"samples: {sample!r} has no t_s, or neither watts nor joules; give them")
    return round(1e6 * t_s), watts, joules, low, high


def check_mergeable(path: Path, into: Path) -> None:
    """Check that a file is a database of this version and another one.

    Nothing is written to it.

    Raises:
        BadInput: It is missing, not ours, of another version, damaged, or the same file.

    Example:
        >>> from pathlib import Path
        >>> check_mergeable(Path("colleague.sqlite"), Path("results.sqlite"))
        Traceback (most recent call last):
        nanolib.measurement.BadInput: ...colleague.sqlite...
    """
    with opening(path), closing(open_for_reading(path)) as other:
        check_version(other, path)
        if path.resolve() == into.resolve():
            raise BadInput(f"database: {path} is this database itself; name another")


@contextmanager
def _of_database(path: Path, db: sqlite3.Connection) -> Iterator[None]:
    """What is found wrong in a file that is merged is told of it."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        ours = isinstance(error, sqlite3.OperationalError) and "no such" not in str(error)
        if ours or not _is_sound(db):
            raise
        raise BadInput(f"database: {path} cannot be merged ({error}); nothing came in; name another") from None


def _is_sound(db: sqlite3.Connection) -> bool:
    """Whether our own database is; both are read at once."""
    try:
        return db.execute("PRAGMA main.quick_check(1)").fetchone() == ("ok",)
    except sqlite3.DatabaseError:
        return False


def _check_names(values: Mapping[str, Any]) -> None:
    for name in {"label", "suite"} & values.keys():
        if len(values[name]) > MOST_LABEL:
            raise BadInput(f"run: {name} {shown(values[name])} will not do; give at most {MOST_LABEL} characters")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
