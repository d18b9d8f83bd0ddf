"""An empty database for each test, and cases that behave as a test needs it."""

import pytest

from nanolib.run import sweep
from tests.run import sample_experiment as sample
from tests.store.conftest import store

__all__ = ["measure", "store"]


@pytest.fixture
def measure(store):
    """Measure cases that behave in these ways."""

    def measured(*behaviors, **rest):
        return sweep.measure(sample, sample.Params(behaviors=list(behaviors), **rest), store=store)

    return measured
