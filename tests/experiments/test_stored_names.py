"""What results are found again by: nothing that is stored may change its name, whatever becomes of the code's."""

import dataclasses
import json
from pathlib import Path

import pytest

from nanolib.experiments import ALL
from nanolib.experiments.model import cases as model
from nanolib.experiments.model.model_cases import ModelCase
from nanolib.paths import checkout
from nanolib.validation import read_yaml

STORED = Path(__file__).parents[1] / "stored" / "case_ids.json"
FILES = sorted(file.relative_to(checkout() / "params") for file in (checkout() / "params").rglob("*.yml"))


def ids_of(file, monkeypatch):
    """The ids of all cases of a params file on a machine where everything fits."""
    monkeypatch.setattr(model, "total_bytes", lambda device: None)
    name = file.stem.split("-")[0]
    module = ALL[name]()
    if not hasattr(module, "cases"):
        return {}
    params = module.Params(**read_yaml(checkout() / "params" / file) | {"device": "cpu"})
    return {case.case_id: str(case) for case in module.cases(params)}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_case_keeps_the_id_under_which_it_is_stored(file, monkeypatch):
    stored, found = json.loads(STORED.read_text()).get(str(file), []), list(ids_of(file, monkeypatch))
    assert [case for case in found if case in set(stored)] == stored  # others may be new


def test_every_params_file_is_pinned():
    assert list(json.loads(STORED.read_text())) == [str(file) for file in FILES]


@pytest.mark.parametrize(
    ("changes", "case_id"),
    [
        ({"batch_size": 1, "reduced": "reduced to fit into 8 GiB: batch_size 4 to 1"}, "fe4e91f48c75045b"),
        (
            {
                "name": "decoder_tiny (num_layers 3)",
                "overrides": {"num_layers": 3},
                "batch_size": 1,
                "reduced": "reduced to fit into 8 GiB: batch_size 4 to 1, num_layers 6 to 3",
            },
            "d167d3c154ba7d3e",
        ),
    ],
)
def test_a_case_that_was_made_smaller_keeps_its_id(changes, case_id):
    case = ModelCase("cpu", "decoder_tiny", "decoder_tiny", {}, "dense", 512, 4, "float32", "inference")
    assert dataclasses.replace(case, **changes).case_id == case_id
