"""An empty database for each test, and cases that behave as a test needs it."""

import pytest

from nanolib.run import sweep
from nanolib.store import Store
from tests.run import sample_experiment as sample


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "results.sqlite") as opened:
        yield opened


@pytest.fixture
def measure(store):
    """Measure cases that behave in these ways."""

    def measured(*behaviors, **rest):
        params = sample.Params(behaviors=list(behaviors), **rest)
        return sweep.measure(sample, params, store=store, progress=False)

    return measured
