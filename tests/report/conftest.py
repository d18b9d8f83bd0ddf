"""A database of made rows, as a table or a verdict reads it."""

import itertools

import pytest

from nanolib.store import Run, Store
from tests.features import results
from tests.report.rows import in_turns, with_endings
from tests.shown import VERDICTS
from tests.store.rows import MACHINE


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """The rows of the stored results."""
    with Store(results(tmp_path_factory.mktemp("stored")), create=False) as store:
        return store.report_data(store.resolve("all"))[0]


@pytest.fixture
def measured(tmp_path):
    """The rows of cases, which are factors with measurements; each argument is a run."""
    numbers = itertools.count()

    def rows(experiment, *runs):
        with Store(tmp_path / f"{next(numbers)}.sqlite") as store:
            for at, cases in enumerate(runs):
                made = in_turns(experiment, with_endings(cases))
                store.add(Run(experiment, MACHINE, rows=made, run_id=f"run-{at}-of-this-test"))
            return store.measurements(samples=True)

    return rows


@pytest.fixture
def say(measured):
    """What a verdict says of cases."""
    return lambda experiment, *runs: VERDICTS[experiment](measured(experiment, *runs))
