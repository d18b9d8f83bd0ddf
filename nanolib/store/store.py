"""Write and delete runs. Each case is one transaction, so a kill loses only the current case."""

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from nanolib.measurement import BadInput, Measurement, RunStatus, Status
from nanolib.store.connection import days_ago
from nanolib.store.query import Reader
from nanolib.store.schema import (
    LISTED,
    TABLES_OF_CASES,
    Run,
    encode,
    insert,
    insert_traces,
    json_list,
)

__all__ = ["Run", "Store"]


class Store(Reader):
    """The database of all results, in one SQLite file.

    Args:
        path: Path of the file, by default in the output folder.
        create: Whether to create a missing file and its folder.

    Raises:
        BadInput: The file is missing (with `create=False`), is not a database of this version of
            nanolib, or is locked.

    Example:
        >>> with Store("results.sqlite") as store:
        ...     len(store.runs())
        0
    """

    def add(self, run: Run) -> str:
        """Add a run. The status is `done` if the run has rows, and otherwise `running`.

        Returns:
            `run_id` of the run.

        Raises:
            BadInput: The file cannot be written.
        """
        row = {name: value for name, value in vars(run).items() if name not in ("machine", "rows")}
        row |= {
            "machine_id": run.machine["machine_id"],
            "started": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "status": RunStatus.DONE if run.rows else RunStatus.RUNNING,
            "message": "",
        }
        with self.transaction() as db:
            insert(db, "machines", run.machine, "REPLACE")
            insert(db, "runs", row)
            for case_id, rows in run.rows.items():
                self.write_case(run.run_id, case_id, *rows)
        return run.run_id

    def write_case(
        self,
        run_id: str,
        case_id: str,
        factors: Mapping[str, Any],
        measurements: Iterable[Measurement],
        traces: Mapping[str, Iterable[Sequence[Any]]] | None = None,
    ) -> None:
        """Replace all rows of a case in one transaction.

        Args:
            run_id: ID of the run.
            case_id: ID of the case.
            factors: Factors that define the case.
            measurements: Measurements of the case.
            traces: Name of a table of `TRACE_TABLES` → rows, with the columns of the table.

        Raises:
            BadInput: The file cannot be written.
            sqlite3.IntegrityError: A row is not valid, or the database has no run with this ID.
        """
        of_case = {"run_id": run_id, "case_id": case_id, "factors": factors}
        with self.transaction() as db:
            for table in TABLES_OF_CASES:
                delete = f"DELETE FROM {table} WHERE run_id = ? AND case_id = ?"
                db.execute(delete, (run_id, case_id))
            for m in measurements:
                samples = struct.pack(f"<{len(m.samples)}d", *m.samples)
                insert(db, "measurements", vars(m) | of_case | {"unit": m.unit, "samples": samples})
            for table, rows in (traces or {}).items():
                insert_traces(db, table, [(run_id, case_id, *row) for row in rows])

    def update_run(self, run_id: str, **values) -> None:
        """Set columns of a run, for example `status=` and `message=`."""
        settings = ", ".join(f"{name} = ?" for name in values)
        encoded = [encode(name, value) for name, value in values.items()]
        with self.transaction() as db:
            db.execute(f"UPDATE runs SET {settings} WHERE run_id = ?", (*encoded, run_id))

    def add_power_samples(
        self, samples: Iterable[Any], *, run_id: str = "", case_id: str = "", source: str = "power"
    ) -> None:
        """Add power samples to a case, in one transaction.

        Args:
            samples: Mappings or objects with a time `t_s` on any clock, s, and with `watts` or
                `joules`. An estimate has `low` and `high` too.
            run_id: ID of the run of the samples, by default of the newest run.
            case_id: ID of the case of the samples.
            source: Name of the power meter.

        Raises:
            BadInput: The run does not exist, a sample has no time or no value, or the file cannot
                be written.
        """
        run_id = run_id or self.resolve("latest")[-1]
        rows = [(run_id, case_id, source, *_power_row(sample)) for sample in samples]
        with self.transaction() as db:
            if not db.execute("SELECT 1 FROM runs WHERE run_id = ?", (run_id,)).fetchone():
                raise BadInput(f"run: {run_id} is not in the database; add it first")
            insert_traces(db, "power_samples", rows)

    def commit_transaction(self) -> None:
        """Do nothing. `add_power_samples` has already written its samples."""

    def forget_started(self, run_id: str) -> None:
        """Delete the `started` rows of a run that the user stopped, so that no attempt counts."""
        query = "DELETE FROM measurements WHERE run_id = ? AND status = ?"
        with self.transaction() as db:
            db.execute(query, (run_id, Status.STARTED))

    def cleanup_old_runs(
        self,
        max_age_days: float | None = 30,
        *,
        run_ids: Collection[str] = (),
        dry_run: bool = False,
    ) -> list[str]:
        """Delete old runs, and free their disk space. nanolib never deletes runs in progress.

        Args:
            max_age_days: Largest age of a run in days, or None for no limit.
            run_ids: IDs of runs to delete regardless of their age.
            dry_run: Whether to return the IDs without deleting the runs.

        Returns:
            The IDs of the deleted runs, oldest first.

        Raises:
            BadInput: The age is below zero, or a run of `run_ids` is in progress.
        """
        if max_age_days is not None and not max_age_days >= 0:
            raise BadInput(f"max_age_days: {max_age_days!r} is not valid; give 0 or more")
        runs = self.runs()
        is_running = runs["status"] == RunStatus.RUNNING
        is_chosen = runs["run_id"].isin(list(run_ids))
        for run_id in runs["run_id"][is_running & is_chosen]:
            raise BadInput(f"run: {run_id[:8]} is still running; stop it first")
        if max_age_days is not None:
            is_chosen |= runs["started"] < days_ago(self.connection, max_age_days)
        chosen = [*runs["run_id"][is_chosen & ~is_running]]
        if not dry_run:
            with self.transaction() as db:
                db.execute(f"DELETE FROM runs WHERE run_id IN {LISTED}", (json_list(chosen),))
            self.connection.execute("VACUUM")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return chosen


def _power_row(sample):
    """Return the time of a sample in µs, and its watts, joules, low and high."""
    t_s, *powers = (
        sample.get(name) if isinstance(sample, Mapping) else getattr(sample, name, None)
        for name in ("t_s", "watts", "joules", "low", "high")
    )
    if t_s is None or powers[:2] == [None, None]:
        raise BadInput(f"samples: {sample!r} has no t_s, or no power; give t_s and watts or joules")
    return round(1e6 * t_s), *powers
