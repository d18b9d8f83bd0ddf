"""Read runs, machines and measurements of a database as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanolib.measurement import BadInput, RunStatus, Status, did_you_mean, quote
from nanolib.store.connection import Connection, alive, days_ago
from nanolib.store.schema import JSON, LISTED, json_list

if TYPE_CHECKING:
    import pandas as pd

SHOWN_CASES = 400  # Largest number of cases per experiment in a report.
# A merge adds older runs later, so the rowid alone is not the order of the runs.
_OLDEST_FIRST, _NEWEST_FIRST = "started, runs.rowid", "started DESC, runs.rowid DESC"
_OF_RUNS = (
    "SELECT results.* FROM results JOIN runs USING (run_id)"
    f" WHERE run_id IN {LISTED} ORDER BY {_OLDEST_FIRST}, id"
)
_NEWEST = f"""
WITH measured AS (SELECT DISTINCT run_id, case_id FROM measurements WHERE run_id IN {LISTED}),
aged AS (
    SELECT run_id, case_id, experiment, started, runs.rowid AS number,
        row_number() OVER (
            PARTITION BY machine_id, experiment, case_id ORDER BY {_NEWEST_FIRST}
        ) AS age
    FROM measured JOIN runs USING (run_id)
),
newest AS (
    SELECT run_id, case_id, started, number,
        row_number() OVER (PARTITION BY experiment ORDER BY started DESC, number DESC) AS place
    FROM aged WHERE age = 1
)
SELECT results.* FROM newest JOIN results USING (run_id, case_id) WHERE place <= ?
ORDER BY started, number, id
"""


class Reader(Connection):
    """The part of `Store` that reads a database."""

    def runs(self, where: str = "1", values: Iterable[Any] = ()) -> pd.DataFrame:
        """Read the runs, newest last, with parsed JSON columns.

        A run whose process has died is `interrupted`. After a week, a run of another machine is
        too.

        Args:
            where: SQL condition with `?` for each value. The condition must not contain user input.
            values: Values for the condition.
        """
        frame = self.read(f"SELECT * FROM runs WHERE {where} ORDER BY {_OLDEST_FIRST}", values)
        limit = days_ago(self.connection, 7)
        for index, run in frame[frame["status"] == RunStatus.RUNNING].iterrows():
            is_alive = alive(run["process"])
            if is_alive is False or (is_alive is None and run["started"] < limit):
                frame.loc[index, "status"] = RunStatus.INTERRUPTED.value
        return frame

    def runs_of(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """Read the runs with these IDs, newest last."""
        return self.runs(f"run_id IN {LISTED}", [json_list(run_ids)])

    def newest_runs(self) -> list[str]:
        """Return the ID of each experiment's newest run. Runs that are done have precedence."""
        query = (
            "SELECT run_id FROM (SELECT run_id, experiment, row_number()"
            f" OVER (PARTITION BY experiment ORDER BY status = ? DESC, {_NEWEST_FIRST}) AS place"
            " FROM runs) WHERE place = 1 ORDER BY experiment"
        )
        return [run_id for (run_id,) in self.connection.execute(query, [RunStatus.DONE])]

    def machines(self) -> pd.DataFrame:
        """Read the machines, with parsed JSON columns."""
        return self.read("SELECT * FROM machines")

    def measurements(
        self,
        run_ids: Iterable[str] | None = None,
        *,
        samples: bool = False,
        newest: int | None = None,
    ) -> pd.DataFrame:
        """Read the measurements, oldest run first, in the order in which nanolib wrote them.

        Each factor has a column `factor.NAME`. The column `factors` contains all factors.

        Args:
            run_ids: IDs of the runs, or None for all runs.
            samples: Whether to return the samples too.
            newest: Largest number of cases per experiment, or None for no limit. With a limit, each
                case comes only from its newest run on each machine.
        """
        import pandas as pd

        chosen = json_list(self.resolve("all") if run_ids is None else run_ids)
        query, limit = (_OF_RUNS, []) if newest is None else (_NEWEST, [newest])
        frame = self.read(query, [chosen, *limit])
        if not samples:
            frame = frame.drop(columns="samples")
        # pandas does not use the dtype float for a column without any number.
        frame = frame.astype(
            dict.fromkeys(("estimate", "low", "high", "confidence", "predicted"), float)
        )
        factors = pd.DataFrame([*frame["factors"]], index=frame.index).add_prefix("factor.")
        return pd.concat([frame, factors], axis=1)

    def report_data(self, run_ids: Iterable[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Read the data that a report shows about some runs.

        Returns:
            The measurements of the newest cases, with samples, and the table of the runs. The table
            includes the newest runs, even if a run has no case.
        """
        ids = list(run_ids)
        rows = self.measurements(ids, samples=True, newest=SHOWN_CASES)
        return rows, self.runs_of({*rows["run_id"], *ids[-SHOWN_CASES:]})

    def figures(
        self, metric: str, machine_ids: Iterable[str], last: int | None = None
    ) -> pd.DataFrame:
        """Read the history of a metric on some machines, oldest run first.

        Args:
            metric: Name of the metric.
            machine_ids: IDs of the machines.
            last: Number of newest runs per experiment and machine, or None for all runs.

        Returns:
            Columns `run_id`, `started`, `git_revision`, `fingerprint`, `machine_id`, `experiment`,
            `case_id`, `factors`, `scope`, `method`, `estimate`, `low`, `high`.
        """
        of_run = "run_id, started, git_revision, fingerprint, machine_id, experiment"
        query = (
            f"WITH chosen AS (SELECT {of_run}, row_number()"
            f" OVER (PARTITION BY machine_id, experiment ORDER BY {_NEWEST_FIRST}) AS place"
            f" FROM runs WHERE machine_id IN {LISTED})"
            f" SELECT {of_run}, case_id, factors, scope, method, estimate, low, high"
            " FROM chosen JOIN measurements USING (run_id)"
            " WHERE place <= coalesce(?, place) AND metric = ? AND estimate IS NOT NULL"
            " ORDER BY started, id"
        )
        return self.read(query, [json_list(machine_ids), last, metric])

    def runs_before(self, run_ids: Iterable[str]) -> list[str]:
        """Return the IDs of the runs that precede the given runs.

        A run is preceded by the last earlier run with the status `done`, the same experiment, suite
        and machine, and at least one case in common that is not a peak rate.

        Args:
            run_ids: IDs of the runs.
        """
        # The outer query does not sort, so it compares the cases of few runs.
        query = (
            "SELECT run_id FROM (SELECT before.run_id, runs.run_id AS after"
            " FROM runs before JOIN runs USING (experiment, suite, machine_id)"
            " WHERE runs.run_id = ? AND before.status = 'done'"
            " AND (before.started, before.rowid) < (runs.started, runs.rowid)"
            " ORDER BY before.started DESC, before.rowid DESC LIMIT -1) AS earlier"
            " WHERE EXISTS (SELECT case_id FROM measurements WHERE run_id = earlier.run_id"
            " AND json_extract(factors, '$.ceiling') IS NULL"
            " INTERSECT SELECT case_id FROM measurements WHERE run_id = after) LIMIT 1"
        )
        found = (self.connection.execute(query, (run_id,)) for run_id in run_ids)
        return list(dict.fromkeys(before for rows in found for (before,) in rows))

    def resolve(self, name: str) -> list[str]:
        """Return the IDs of the runs that a name refers to.

        nanolib looks for the name in this order: `all`, `latest`, `latest~1`, an ID, a label, an
        experiment, a suite, and the start of an ID.

        `latest` means all runs of the latest command. `latest~1` means runs of the last earlier
        command that ran one of the same notebooks. Runs of other notebooks are left out.

        Args:
            name: Name of the runs.

        Raises:
            BadInput: No run has this name.
        """
        runs = self.connection.execute(
            f"SELECT run_id, label, experiment, suite FROM runs ORDER BY {_OLDEST_FIRST}"
        ).fetchall()
        if name == "all":
            return [run_id for run_id, *_ in runs]
        if name == "latest" or name.startswith("latest~"):
            return self._launch(name)
        for place in range(4):
            if found := [run[0] for run in runs if name and run[place] == name]:
                return found
        found = [run_id for run_id, *_ in runs if len(name) >= 4 and run_id.startswith(name)]
        if len(found) > 1:
            raise BadInput(f"run: {quote(name)} is the start of {len(found)} IDs; give more digits")
        if found:
            return found
        hint = did_you_mean(name, (word for _, *words in runs for word in words))
        text = f"run: {quote(name)} is not in the database; {hint and f'{hint} '}"
        raise BadInput(f"{text}`nano runs` lists all runs")

    def _launch(self, name: str) -> list[str]:
        """Return the IDs of the runs that `latest` or `latest~N` names."""
        query = f"SELECT run_id, launch, experiment FROM runs ORDER BY {_NEWEST_FIRST}"
        commands = {}  # token of a command → ID and experiment of each of its runs
        for run_id, launch, experiment in self.connection.execute(query):
            command = launch.partition("/")[0] or run_id
            commands.setdefault(command, []).append((run_id, experiment))
        newest = {experiment for _, experiment in next(iter(commands.values()), [])}
        found = []
        for runs in commands.values():
            if ids := [run_id for run_id, experiment in reversed(runs) if experiment in newest]:
                found.append(ids)
        place = name.removeprefix("latest").removeprefix("~") or "0"
        if place not in map(str, range(len(found))):
            of = f" {', '.join(sorted(newest))}" if newest else ""
            raise BadInput(
                f"run: {quote(name)} does not exist; "
                f"only {len(found)} command(s) ran{of}; `nano runs` lists all runs"
            )
        return found[int(place)]

    def started_attempts(self, run_id: str) -> dict[str, int]:
        """Return the number of attempts of each case that was started and has not ended."""
        query = (
            "SELECT case_id, coalesce(json_extract(details, '$.attempts'), 1) FROM measurements"
            " WHERE run_id = ? AND metric = 'case_duration' AND status = ?"
        )
        return dict(self.connection.execute(query, (run_id, Status.STARTED)))

    def finished_cases(self, run_id: str) -> set[str]:
        """Return the IDs of the cases of a run that have ended, with any status."""
        query = (
            "SELECT case_id FROM measurements"
            " WHERE run_id = ? AND metric = 'case_duration' AND status != ?"
        )
        return {case_id for (case_id,) in self.connection.execute(query, (run_id, Status.STARTED))}

    def case_endings(self, run_id: str) -> list[tuple[str, int, float]]:
        """Return each status of a run's cases, with the number of cases and the total time in s."""
        query = (
            "SELECT status, count(*), total(estimate) FROM measurements"
            " WHERE run_id = ? AND metric = 'case_duration' GROUP BY status"
        )
        return self.connection.execute(query, (run_id,)).fetchall()

    def read(self, query: str, values: Iterable[Any] = ()) -> pd.DataFrame:
        """Read the rows of an SQL query.

        Args:
            query: Query with `?` for each value. The query must not contain user input.
            values: Values for the query.

        Returns:
            The rows, with parsed JSON columns, and with samples as float64 arrays of shape [n].
        """
        import numpy as np
        import pandas as pd

        found = self.connection.execute(query, list(values))
        names = [name for name, *_ in found.description]
        frame = pd.DataFrame(found.fetchall(), columns=names)
        for name in JSON & set(frame.columns):
            frame[name] = frame[name].map(json.loads).astype(object)
        if "samples" in frame:
            frame["samples"] = [
                np.frombuffer(blob or b"", dtype="<f8") for blob in frame["samples"]
            ]
        return frame
