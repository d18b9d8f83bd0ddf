"""Define the parameters of the summary notebook, and read the rows that the notebook shows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from nanolib.experiments import sections
from nanolib.measurement import MOST_LABEL
from nanolib.params import StrictModel
from nanolib.report import overview
from nanolib.report.section import Finding, Part
from nanolib.store import Store


class Params(StrictModel):
    """Parameters of the summary notebook.

    Attributes:
        runs: Runs to show: IDs, labels, experiments, `latest`, `latest~1`, `all`, or `newest` for
            the newest run of each experiment.
        suite: Name of the set of parameters.
        label: Not used, since the summary stores no run.
        resume: Not used, since the summary stores no run.
    """

    NAME = "summary"
    MAIN = ("runs",)

    runs: list[Annotated[str, Field(max_length=MOST_LABEL)]] = Field(
        ["newest"], min_length=1, max_length=1000
    )
    suite: str = Field("", max_length=MOST_LABEL)
    label: str = Field("", max_length=MOST_LABEL)
    resume: bool = False

    def look(self, cases: Sequence[Any]) -> None:
        """Check that the database has the named runs.

        Raises:
            BadInput: A name matches no run.
        """
        if self.runs != ["newest"]:
            with Store(create=False) as store:
                select_runs(store, self.runs)


def select_runs(store: Store, names: Sequence[str]) -> list[str]:
    """Return the IDs of the runs that the names match, without duplicates.

    The name `newest`, or no name, means the newest run of each experiment.

    Raises:
        BadInput: A name matches no run.
    """
    ids = []
    for name in names or ["newest"]:
        ids += store.newest_runs() if name == "newest" else store.resolve(name)
    return list(dict.fromkeys(ids))


def answers(rows: pd.DataFrame) -> list[Finding]:
    """Return the first finding of each section that has rows, under the question it answers."""
    found = []
    for section in sections():
        if section.experiment in set(rows["experiment"]):
            for first in section.verdict(rows)[:1]:
                found.append(replace(first, about=f"{section.question} {first.about}".strip()))
    return found


def changes(params: Params) -> Part:
    """Compare the selected runs with earlier runs, and find changes over the recent runs."""
    with Store() as store:
        return overview.changes(store, store.runs_of(select_runs(store, params.runs)))


def load(params: Params) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Read the selected runs, with the newest measurement of each case.

    Returns:
        Four tables: the runs, the machines, the rows of each experiment on the machine of the
        experiment's newest run, and the rows of all machines.

    Raises:
        BadInput: A name matches no run, or the database cannot be read.
    """
    with Store() as store:
        rows, runs = store.report_data(select_runs(store, params.runs))
        return runs, store.machines(), overview.newest_machine(rows, runs), rows
