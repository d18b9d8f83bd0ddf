"""nanolib offers and shows what the list says; after a change run `python tests/features.py`."""

import json

import pytest

from tests.features import LIST, features


@pytest.mark.slow
def test_commands_parameters_metrics_and_the_report_of_stored_results_are_those_of_the_list():
    assert json.loads(json.dumps(features())) == json.loads(LIST.read_text(encoding="utf-8"))
