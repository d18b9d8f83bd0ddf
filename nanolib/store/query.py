"""Read a database: runs, machines, rows and traces as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanolib.measurement import BadInput, RunStatus, Status, did_you_mean, shown
from nanolib.store.connection import Connection, value_of
from nanolib.store.identity import gone
from nanolib.store.schema import JSON, LISTED, NAMED, TRACE_TABLES

if TYPE_CHECKING:
    import pandas as pd

SHOWN_CASES = 400  # of an experiment, the newest: more than a browser can draw helps nobody
_NEWEST = f"""
WITH held AS (SELECT DISTINCT run_id, case_id FROM measurements WHERE run_id IN {LISTED}),
aged AS (
    SELECT run_id, case_id, experiment, r.rowid AS number,
        row_number() OVER (
            PARTITION BY machine_id, experiment, case_id ORDER BY r.rowid DESC
        ) AS age
    FROM held JOIN runs r USING (run_id)
),
newest AS (
    SELECT run_id, case_id,
        row_number() OVER (PARTITION BY experiment ORDER BY number DESC) AS place
    FROM aged WHERE age = 1
)
SELECT results.* FROM newest JOIN results USING (run_id, case_id) WHERE place <= ? ORDER BY id
"""


class Reader(Connection):
    """An open database, for reading."""

    def trace(self, table: str, run_ids: Iterable[str] | None = None) -> pd.DataFrame:
        """Read the rows of one kind of trace, in the order seen.

        Args:
            table: A key of `TRACE_TABLES`: `power_samples`, `sections`, `tokens`, `layers`,
                `statistics`, `ops`.
            run_ids: Of which runs; None means all.

        Returns:
            Columns `run_id`, `case_id` and those of the table, names instead of their indices.
        """
        if table not in TRACE_TABLES:
            raise BadInput(f"table: {table!r} is not a trace; use {', '.join(TRACE_TABLES)}")
        columns = TRACE_TABLES[table]
        frame = self._read(
            f"SELECT run_id, case_id, names, {', '.join(columns)} FROM {table}"
            f" JOIN traces USING (trace_id) WHERE {_among(run_ids)} ORDER BY traces.rowid, number",
            _values(run_ids),
        )
        for column in set(columns) & set(NAMED):
            frame[column] = [
                names[at] for names, at in zip(frame["names"], frame[column], strict=True)
            ]
        return frame.drop(columns="names")

    def runs(self, where: str = "1", values: Iterable[Any] = ()) -> pd.DataFrame:
        """Read the runs, newest last, JSON columns parsed; one whose process died is `interrupted`.

        Args:
            where: An SQL condition with `?` for values; never built from input.
            values: The values.
        """
        frame = self._read(f"SELECT * FROM runs WHERE {where} ORDER BY rowid", values)
        running = frame["status"] == RunStatus.RUNNING
        frame.loc[running & frame["process"].map(gone).astype(bool), "status"] = (
            RunStatus.INTERRUPTED.value
        )
        return frame

    def runs_of(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """Read the runs with these ids, newest last."""
        return self.runs(f"run_id IN {LISTED}", [listed(run_ids)])

    def newest_runs(self) -> list[str]:
        """Find each experiment's newest run that is done, or its newest if none is."""
        query = (
            "SELECT run_id FROM (SELECT run_id, experiment, row_number()"
            " OVER (PARTITION BY experiment ORDER BY status = ? DESC, rowid DESC) AS place"
            " FROM runs) WHERE place = 1 ORDER BY experiment"
        )
        return [run_id for (run_id,) in self.connection.execute(query, [RunStatus.DONE])]

    def machines(self) -> pd.DataFrame:
        """Read the machines; JSON columns parsed."""
        return self._read("SELECT * FROM machines")

    def measurements(
        self,
        run_ids: Iterable[str] | None = None,
        *,
        samples: bool = False,
        newest: int | None = None,
    ) -> pd.DataFrame:
        """Read the measurements, in the order written.

        Each factor is a column `factor.NAME`, next to the parsed `factors`.

        Args:
            run_ids: Of which runs; None means all.
            samples: Whether to load all samples (as float64 arrays) too.
            newest: At most this many cases of an experiment, the newest ones, and of each case the
                newest run on each machine.
        """
        import numpy as np
        import pandas as pd

        if newest is None:
            frame = self._read(
                f"SELECT * FROM results WHERE {_among(run_ids)} ORDER BY id", _values(run_ids)
            )
        else:
            run_ids = self.resolve("all") if run_ids is None else run_ids
            frame = self._read(_NEWEST, [listed(run_ids), newest])
        if samples:
            frame["samples"] = [
                np.frombuffer(blob or b"", dtype="<f8") for blob in frame["samples"]
            ]
        else:
            frame = frame.drop(columns="samples")
        # A column without a number is not one of floats yet.
        frame = frame.astype(
            dict.fromkeys(("estimate", "low", "high", "confidence", "predicted"), float)
        )
        factors = pd.json_normalize(list(frame["factors"]), max_level=0).add_prefix("factor.")
        return pd.concat([frame, factors.set_index(frame.index)], axis=1)

    def shown(self, run_ids: Iterable[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Read the part of runs that a report shows.

        Returns:
            The newest cases, with samples; and their runs, with the newest that have no case.
        """
        ids = list(run_ids)
        rows = self.measurements(ids, samples=True, newest=SHOWN_CASES)
        return rows, self.runs_of({*rows["run_id"], *ids[-SHOWN_CASES:]})

    def count_cases(self, run_ids: Iterable[str]) -> int:
        """Count the cases of runs, each once per machine and experiment."""
        query = (
            "SELECT count(*) FROM (SELECT DISTINCT machine_id, experiment, case_id FROM results"
            f" WHERE run_id IN {LISTED})"
        )
        return value_of(self.connection.execute(query, [listed(run_ids)]))

    def figures(
        self, metric: str, machine_ids: Iterable[str], last: int | None = None
    ) -> pd.DataFrame:
        """Read one metric over the runs of some machines, oldest run first, for a history.

        Args:
            metric: Which.
            machine_ids: Of which machines.
            last: Only this many runs of each experiment on each machine, the newest; None for all.

        Returns:
            Columns `run_id`, `started`, `git_revision`, `machine_id`, `experiment`, `case_id`,
            `factors`, `scope`, `method`, `estimate`, `low`, `high`, `confidence`.
        """
        query = (
            "WITH chosen AS (SELECT run_id, started, git_revision, machine_id, experiment,"
            " row_number() OVER (PARTITION BY machine_id, experiment ORDER BY rowid DESC) AS place"
            f" FROM runs WHERE machine_id IN {LISTED})"
            " SELECT run_id, started, git_revision, machine_id, experiment, case_id, factors,"
            " scope, method, estimate, low, high, confidence"
            " FROM chosen JOIN measurements USING (run_id)"
            " WHERE place <= ? AND metric = ? AND estimate IS NOT NULL ORDER BY started, id"
        )
        return self._read(query, [listed(machine_ids), 2**60 if last is None else last, metric])

    def runs_before(self, run_ids: Iterable[str], but: str = "") -> list[str]:
        """Find the last run before each that is done, of the same experiment, suite and machine.

        Args:
            run_ids: Which runs.
            but: An experiment to leave out.
        """
        query = (
            "SELECT before.run_id FROM runs before JOIN runs USING (experiment, suite, machine_id)"
            " WHERE runs.run_id = ? AND experiment != ? AND before.status = 'done'"
            " AND before.rowid < runs.rowid ORDER BY before.rowid DESC LIMIT 1"
        )
        found = (self.connection.execute(query, (run_id, but)) for run_id in run_ids)
        return list(dict.fromkeys(before for rows in found for (before,) in rows))

    def resolve(self, name: str) -> list[str]:
        """Find the run ids that a name stands for.

        A name is `all`, `latest`, `latest~1`, an id, a label, an experiment, a suite, or the
        beginning of an id; the first of these that fits.

        `latest` is the latest launch: all runs that one command started. `latest~1` is the launch
        before it that ran one of the same notebooks, and only its runs of these.

        Raises:
            BadInput: Nothing goes by that name.
        """
        runs = self.connection.execute(
            "SELECT run_id, label, experiment, suite FROM runs ORDER BY rowid"
        ).fetchall()
        if name == "all":
            return [run_id for run_id, *_ in runs]
        if name == "latest" or name.startswith("latest~"):
            return self._launch(name)
        for place in range(4):
            if found := [run[0] for run in runs if name and run[place] == name]:
                return found
        if found := [run_id for run_id, *_ in runs if len(name) >= 4 and run_id.startswith(name)]:
            return found
        known = dict.fromkeys(word for _, *words in runs for word in words if word)
        hint = did_you_mean(name, known)
        raise BadInput(
            f"run: {shown(name)} is not in the database; {hint and f'{hint} '}"
            "`nano runs` lists what is"
        )

    def _launch(self, name: str) -> list[str]:
        """Find the runs of `latest` or `latest~N`."""
        query = (
            "SELECT run_id, coalesce(nullif(launch, ''), run_id), experiment FROM runs"
            " ORDER BY rowid DESC"
        )
        runs = self.connection.execute(query).fetchall()
        same = list(
            dict.fromkeys(experiment for _, launch, experiment in runs if launch == runs[0][1])
        )
        launches = list(
            dict.fromkeys(launch for _, launch, experiment in runs if experiment in same)
        )
        back = name.removeprefix("latest").removeprefix("~") or "0"
        if back not in map(str, range(len(launches))):
            of = f" of {', '.join(reversed(same))}" if same else ""
            raise BadInput(
                f"run: {shown(name)} is not there; "
                f"the database contains {len(launches)} launch(es){of}"
            )
        wanted = launches[int(back)]
        return [
            run_id
            for run_id, launch, experiment in reversed(runs)
            if launch == wanted and experiment in same
        ]

    def started_attempts(self, run_id: str) -> dict[str, int]:
        """Return the cases that were started and never ended → how often they were started."""
        query = (
            "SELECT case_id, coalesce(json_extract(details, '$.attempts'), 1) FROM measurements"
            " WHERE run_id = ? AND metric = 'case_duration' AND status = ?"
        )
        return dict(self.connection.execute(query, (run_id, Status.STARTED)).fetchall())

    def finished_cases(self, run_id: str) -> set[str]:
        """Return the cases of a run that have ended, however."""
        query = (
            "SELECT case_id FROM measurements"
            " WHERE run_id = ? AND metric = 'case_duration' AND status != ?"
        )
        return {case_id for (case_id,) in self.connection.execute(query, (run_id, Status.STARTED))}

    def case_endings(self, run_id: str) -> list[tuple[str, int, float]]:
        """Count the cases of a run by status: status, how many, seconds inside them."""
        query = (
            "SELECT status, count(*), total(estimate) FROM measurements"
            " WHERE run_id = ? AND metric = 'case_duration' GROUP BY status"
        )
        return self.connection.execute(query, (run_id,)).fetchall()

    def _read(self, query: str, values: Iterable[Any] = ()) -> pd.DataFrame:
        """Read rows, JSON columns parsed."""
        import pandas as pd

        frame = pd.read_sql_query(query, self.connection, params=list(values))
        for name in JSON & set(frame.columns):
            frame[name] = frame[name].map(json.loads).astype(object)
        return frame


def listed(names: Iterable[str]) -> str:
    """Return names for a query, as JSON."""
    return json.dumps(list(names))


def _among(run_ids: Iterable[str] | None) -> str:
    return "1" if run_ids is None else f"run_id IN {LISTED}"


def _values(run_ids: Iterable[str] | None) -> list[str]:
    return [] if run_ids is None else [listed(run_ids)]
