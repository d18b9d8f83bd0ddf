"""An empty database for each test."""

import pytest

from nanolib.store import Store


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "results.sqlite") as opened:
        yield opened
