"""nanolib offers and shows what the list says; after a change run `python tests/features.py`."""

import json

import pytest

from tests.features import LIST, commands, features, parameters

SAID = json.loads(LIST.read_text(encoding="utf-8"))


@pytest.mark.parametrize("found", [commands, parameters], ids=lambda found: found.__name__)
def test_commands_options_and_parameters_are_those_of_the_list(found):
    assert json.loads(json.dumps(found())) == SAID[found.__name__]


@pytest.mark.slow
def test_metrics_and_the_report_of_stored_results_are_those_of_the_list():
    assert json.loads(json.dumps(features())) == SAID
