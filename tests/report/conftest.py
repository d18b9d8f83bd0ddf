"""A database of made rows, as a table reads it."""

import pytest

from nanolib.store import Run, Store
from tests.report.rows import MACHINE


@pytest.fixture
def measured(tmp_path):
    def rows(experiment, *runs):
        with Store(tmp_path / "measured.sqlite") as store:
            for at, cases in enumerate(runs):
                found = {str(i): case for i, case in enumerate(cases)}
                store.add(Run(experiment, MACHINE, rows=found, run_id=f"run{at}"))
            return store.measurements(samples=True)

    return rows
