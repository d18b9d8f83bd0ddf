"""A database of made rows, as a table reads it."""

import itertools

import pytest

from nanolib.store import Run, Store
from tests.report.rounds import in_turns
from tests.report.rows import MACHINE, ended
from tests.shown import VERDICTS


@pytest.fixture
def measured(tmp_path):
    def rows(experiment, *runs):
        with Store(tmp_path / "measured.sqlite") as store:
            for at, cases in enumerate(runs):
                found = {str(i): case for i, case in enumerate(cases)}
                store.add(
                    Run(experiment, MACHINE, rows=in_turns(experiment, found), run_id=f"run{at}")
                )
            return store.measurements(samples=True)

    return rows


@pytest.fixture
def say(tmp_path):
    """What a verdict says of cases, which are factors with measurements; several runs are several arguments."""
    numbers = itertools.count()

    def said(experiment, *runs):
        with Store(tmp_path / f"{next(numbers)}.sqlite") as store:
            for at, cases in enumerate(runs):
                rows = {
                    str(i): (factors, [ended(), *found]) for i, (factors, found) in enumerate(cases)
                }
                rows = in_turns(experiment, rows)
                store.add(Run(experiment, MACHINE, rows=rows, run_id=f"run-{at}-of-this-test"))
            return VERDICTS[experiment](store.measurements(samples=True))

    return said
