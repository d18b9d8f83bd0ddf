"""What comes out of a database: runs, machines, rows and traces as tables, broken ones shown as broken."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanolib.measurement import BadInput, RunStatus, Status, did_you_mean, shown
from nanolib.store.identity import gone
from nanolib.store.schema import HAS_RUN, LISTED, NAMED, TRACE_TABLES

if TYPE_CHECKING:
    import pandas as pd

from nanolib.store.connection import Connection, value_of

SHOWN_CASES = 400  # of an experiment, the newest: what a person can still look at, and a browser draw
BROKEN = "broken"  # how what cannot be decoded is shown; nothing is stored with it
# columns of JSON → what they hold
_JSON: dict[str, type] = {
    **dict.fromkeys(("gpus", "disturbances", "flags", "names"), list),
    **dict.fromkeys(("params", "versions", "dtypes", "factors", "details"), dict),
}
_NEWEST = (
    "WITH pairs AS (SELECT DISTINCT run_id, case_id FROM measurements WHERE {condition}),"
    " aged AS (SELECT run_id, case_id, r.rowid AS number, experiment,"
    " row_number() OVER (PARTITION BY machine_id, experiment, case_id ORDER BY r.rowid DESC) AS age"
    " FROM pairs JOIN runs r USING (run_id)),"
    " shown AS (SELECT run_id, case_id, row_number() OVER (PARTITION BY experiment ORDER BY number DESC) AS place"
    " FROM aged WHERE age = 1)"
    " SELECT {columns} FROM shown JOIN measurements m USING (run_id, case_id) WHERE place <= ? ORDER BY m.id"
)


class Reader(Connection):
    """A database that is read."""

    def trace(self, table: str, run_ids: Iterable[str] | None = None) -> pd.DataFrame:
        """Read the rows of one kind of trace, in the order seen.

        Args:
            table: A key of `TRACE_TABLES`: `power_samples`, `sections`, `tokens`, `layers`, `statistics`, `ops`.
            run_ids: Of which runs; None means all.

        Returns:
            Columns `run_id`, `case_id` and those of the table, names instead of their indices.
        """
        if table not in TRACE_TABLES:
            raise BadInput(f"table: {table!r} is no trace; use {', '.join(TRACE_TABLES)}")
        import pandas as pd

        condition = HAS_RUN if run_ids is None else f"run_id IN {LISTED}"
        columns = TRACE_TABLES[table]
        traces, wrong = self._read(
            f"SELECT trace_id, run_id, case_id, names FROM traces WHERE {condition} ORDER BY trace_id",
            [] if run_ids is None else [listed(run_ids)],
        )
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE trace_id = ? ORDER BY number"
        frames = []
        for trace_id, run_id, case_id, known in traces.drop(index=list(wrong)).itertuples(index=False):
            frame = pd.read_sql_query(query, self.connection, params=(trace_id,))
            for column in set(columns) & set(NAMED):
                frame[column] = [known[at] for at in frame[column]]
            frame.insert(0, "case_id", case_id)
            frame.insert(0, "run_id", run_id)
            frames.append(frame)
        full = [frame for frame in frames if len(frame)]
        return pd.concat(full, ignore_index=True) if full else pd.DataFrame(columns=["run_id", "case_id", *columns])

    def runs(self, where: str = "1", values: Iterable[Any] = ()) -> pd.DataFrame:
        """Read the runs, newest last; JSON columns parsed. One whose process is gone is `interrupted`, whatever it said last.

        Args:
            where: An SQL condition with `?` for values; never built from input.
            values: The values.
        """
        frame, wrong = self._read(f"SELECT * FROM runs WHERE {where} ORDER BY rowid", values)
        for place, column in wrong.items():
            told = f"this run is broken: its {column} cannot be decoded; {_removed(frame.loc[place, 'run_id'])}"
            frame.loc[place, ["status", "message"]] = BROKEN, told
        dead = [
            status == RunStatus.RUNNING and gone(process, self.path)
            for status, process in zip(frame["status"], frame["process"], strict=True)
        ]
        frame.loc[dead, "status"] = RunStatus.INTERRUPTED.value
        return frame

    def runs_of(self, run_ids: Iterable[str]) -> pd.DataFrame:
        """Read the runs with these ids, newest last."""
        return self.runs(f"run_id IN {LISTED}", [listed(run_ids)])

    def newest_runs(self) -> list[str]:
        """Find each experiment's newest run that is done, or its newest where none is."""
        query = (
            "SELECT run_id FROM (SELECT run_id, experiment, row_number()"
            " OVER (PARTITION BY experiment ORDER BY status = ? DESC, rowid DESC) AS place FROM runs)"
            " WHERE place = 1 ORDER BY experiment"
        )
        return [run_id for (run_id,) in self.connection.execute(query, [RunStatus.DONE])]

    def machines(self) -> pd.DataFrame:
        """Read the machines; JSON columns parsed."""
        frame, wrong = self._read("SELECT * FROM machines")
        for place, column in wrong.items():
            frame.loc[place, "cpu"] = f"this machine's row is broken: its {column} cannot be decoded"
        return frame

    def measurements(
        self,
        run_ids: Iterable[str] | None = None,
        *,
        samples: bool = False,
        newest: int | None = None,
    ) -> pd.DataFrame:
        """Read the measurements, in the order written.

        Each factor is a column `factor.NAME` beside the parsed `factors`.

        Args:
            run_ids: Of which runs; None means all.
            samples: Whether to load all samples (as float64 arrays) too.
            newest: Of a case that several of its runs hold, only the newest on each machine; and of an experiment at most so many
                cases, the newest ones.
        """
        import numpy as np
        import pandas as pd

        columns = [row[1] for row in self.connection.execute("PRAGMA table_info(measurements)")]
        columns = [name for name in columns if samples or name != "samples"]
        ids = None if run_ids is None else list(run_ids)
        condition = "1" if ids is None else f"run_id IN {LISTED}"
        query = f"SELECT {', '.join(columns)} FROM measurements WHERE {condition} ORDER BY id"
        values: list[Any] = [] if ids is None else [listed(ids)]
        if newest is not None:
            query = _NEWEST.format(columns=", ".join(f"m.{name}" for name in columns), condition=condition)
            values.append(newest)
        frame, wrong = self._read(query, values)
        for place, column in wrong.items():
            row = frame.loc[place]
            told = f"row {row['id']} is broken: its {column} cannot be decoded; {_removed(row['run_id'])}"
            for name, value in (_BROKEN_ROW | {"message": told}).items():
                if name in frame:
                    frame.at[place, name] = value
        # all None too
        frame = frame.astype(dict.fromkeys(("estimate", "low", "high", "confidence", "predicted"), float))
        if samples:
            frame["samples"] = [np.frombuffer(blob or b"", dtype="<f8") for blob in frame["samples"]]
        factors = pd.json_normalize(list(frame["factors"]), max_level=0).add_prefix("factor.")
        return pd.concat([frame, factors.set_index(frame.index)], axis=1)

    def shown(self, run_ids: Iterable[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Read what a person is shown of runs.

        Returns:
            The newest cases, with samples; and their runs, with the newest that hold no case.
        """
        ids = list(run_ids)
        rows = self.measurements(ids, samples=True, newest=SHOWN_CASES)
        return rows, self.runs_of({*rows["run_id"], *ids[-SHOWN_CASES:]})

    def count_cases(self, run_ids: Iterable[str]) -> int:
        """Count the cases of runs, each once per machine and experiment: ceilings are in several."""
        query = (
            "SELECT count(*) FROM (SELECT DISTINCT r.machine_id, r.experiment, case_id FROM"
            f" (SELECT DISTINCT run_id, case_id FROM measurements WHERE run_id IN {LISTED}) JOIN runs r USING (run_id))"
        )
        return value_of(self.connection.execute(query, [listed(run_ids)]))

    def figures(self, metric: str, machine_ids: Iterable[str], last: int | None = None) -> pd.DataFrame:
        """One metric over the runs of some machines, oldest run first, with what a history needs and nothing more.

        Args:
            metric: Which.
            machine_ids: Of which machines.
            last: Of each experiment on each machine only so many runs, the newest; None means all.

        Returns:
            Columns `run_id`, `started`, `git_revision`, `machine_id`, `experiment`, `case_id`, `factors`, `scope`, `method`,
            `estimate`, `low`, `high`, `confidence`.
        """
        query = (
            "WITH chosen AS (SELECT run_id, started, git_revision, row_number() OVER"
            " (PARTITION BY machine_id, experiment ORDER BY rowid DESC) AS place"
            f" FROM runs WHERE machine_id IN {LISTED})"
            " SELECT run_id, started, git_revision, m.machine_id, m.experiment, case_id, factors, scope, method,"
            " estimate, low, high, confidence"
            " FROM chosen JOIN measurements m USING (run_id) WHERE place <= ? AND metric = ? AND estimate IS NOT NULL"
            " ORDER BY started, id"
        )
        frame, wrong = self._read(query, [listed(machine_ids), 2**60 if last is None else last, metric])
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

    def runs_with(self, case_ids: Iterable[str], but: Iterable[str] = (), last: int = 3) -> list[str]:
        """Short names of the newest runs that hold one of these cases, the newest first.

        Args:
            case_ids: Which cases.
            but: Runs that are left out.
            last: How many.
        """
        query = (
            f"SELECT run_id FROM runs WHERE run_id NOT IN {LISTED} AND run_id IN"
            f" (SELECT run_id FROM measurements WHERE case_id IN {LISTED}) ORDER BY rowid DESC LIMIT ?"
        )
        return [run_id[:8] for (run_id,) in self.connection.execute(query, [listed(but), listed(case_ids), last])]

    def _read(self, query: str, values: Iterable[Any] = ()) -> tuple[pd.DataFrame, dict[int, str]]:
        """The rows, JSON parsed; and of those that cannot be decoded the column that cannot, by their place."""
        import pandas as pd

        cursor = self.connection.execute(query, tuple(values))
        names = [column[0] for column in cursor.description]
        rows, wrong = [], {}
        for place, row in enumerate(cursor):
            found = list(row)
            for at, name in enumerate(names):
                try:
                    found[at] = _decoded(name, row[at])
                except (ValueError, TypeError, RecursionError):
                    wrong[place] = name
                    found[at] = _JSON[name]() if name in _JSON else None
            rows.append(found)
        return pd.DataFrame.from_records(rows, columns=names, coerce_float=True), wrong

    def resolve(self, name: str) -> list[str]:
        """Find the run ids that a name stands for.

        A name is an id or its beginning, a label, an experiment, a suite, `latest`, `latest~1` or `all`.

        `latest` is the latest launch: all runs that one command started. `latest~1` is the launch before it that ran one of
        the same notebooks, and its runs of these alone.

        Raises:
            BadInput: Nothing goes by that name.
        """
        query = "SELECT run_id, label, coalesce(nullif(launch, ''), run_id), experiment, suite FROM runs ORDER BY rowid"
        runs = self.connection.execute(query).fetchall()
        if name == "all":
            return [run_id for run_id, *_ in runs]
        if name == "latest" or name.startswith("latest~"):
            back = name.removeprefix("latest").removeprefix("~") or "0"
            newest = runs[-1][2] if runs else ""
            same = list(dict.fromkeys(experiment for _, _, launch, experiment, _ in runs if launch == newest))
            launches = dict.fromkeys(launch for _, _, launch, experiment, _ in reversed(runs) if experiment in same)
            by_place = {str(place): launch for place, launch in enumerate(launches)}
            if back not in by_place:
                of = f" of {', '.join(same)}" if same else ""
                raise BadInput(f"run: {shown(name)} is not there; the database holds {len(launches)} launch(es){of}")
            return [
                run_id for run_id, _, launch, experiment, _ in runs if launch == by_place[back] and experiment in same
            ]
        found = [run_id for run_id, label, *_ in runs if label == name and name]
        found = found or [run_id for run_id, _, _, *groups in runs if name and name in groups]
        by_id = [run_id for run_id, *_ in runs if name and run_id == name]
        by_id = by_id or [run_id for run_id, *_ in runs if len(name) >= 4 and run_id.startswith(name)]
        if found and by_id and set(found) != set(by_id):
            raise BadInput(
                f"run: {shown(name)} is what run {found[0]} is called, and how the id of run {by_id[0]} begins; give a whole id"
            )
        found = found or by_id
        if not found:
            known = dict.fromkeys(word for _, label, _, *groups in runs for word in (label, *groups) if word)
            hint = did_you_mean(name, known)
            raise BadInput(f"run: {shown(name)} is not in the database; {hint and f'{hint} '}`nano runs` lists what is")
        return found

    def started_attempts(self, run_id: str) -> dict[str, int]:
        """Cases that were started and never ended → how often they were tried."""
        query = "SELECT case_id, details FROM measurements WHERE run_id = ? AND metric = 'case_time' AND status = ?"
        rows, wrong = self._read(query, (run_id, Status.STARTED))
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


def listed(names: Iterable[str]) -> str:
    """Names for a query, as JSON."""
    return json.dumps(list(names))


_BROKEN_ROW = {
    "metric": "case_time",
    "scope": "",
    "unit": "s",
    **dict.fromkeys(("estimate", "low", "high", "confidence", "predicted", "samples")),
    "n": 0,
    "method": BROKEN,
    "status": Status.ERROR.value,
    "flags": [],
    "factors": {},
    "details": {},
}


def _removed(run_id: str) -> str:
    return f"nano clean --run {run_id[:8]} removes the run"


def _decoded(column: str, value: Any) -> Any:
    """What a stored value stands for.

    Raises:
        ValueError: It stands for nothing.
    """
    if column in _JSON:
        found = json.loads(value)
        if not isinstance(found, _JSON[column]):
            raise ValueError(column)
        return found
    if column == "samples" and len(value or b"") % 8:
        raise ValueError(column)
    return value
