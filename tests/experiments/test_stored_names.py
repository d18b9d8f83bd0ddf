"""What results are found again by: nothing that is stored may change its name, whatever becomes of the code's."""

import json
from pathlib import Path

import pytest

from nanolib.experiments import ALL
from nanolib.params import read_yaml
from nanolib.paths import checkout

STORED = Path(__file__).parents[1] / "stored" / "case_ids.json"
FILES = sorted(
    file.relative_to(checkout() / "params") for file in (checkout() / "params").rglob("*.yml")
)


def ids_of(file):
    """The ids of all cases of a params file."""
    name = file.stem.split("-")[0]
    module = ALL[name]()
    if not hasattr(module, "cases"):
        return {}
    params = module.Params(**read_yaml(checkout() / "params" / file) | {"device": "cpu"})
    return {case.case_id: str(case) for case in module.cases(params)}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_case_keeps_the_id_under_which_it_is_stored(file):
    stored, found = json.loads(STORED.read_text()).get(str(file), []), list(ids_of(file))
    assert [case for case in found if case in set(stored)] == stored  # others may be new


def test_every_params_file_is_pinned():
    assert list(json.loads(STORED.read_text())) == [str(file) for file in FILES]
