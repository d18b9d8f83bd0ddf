"""Results are found again: a case keeps its stored id, whatever becomes of the code's names."""

import hashlib
import json
from pathlib import Path

from nanolib.experiments import ALL
from nanolib.params import read_yaml
from nanolib.paths import checkout

STORED = Path(__file__).parents[1] / "stored" / "case_ids.json"


def case_ids():
    """Of each params file the number of cases and a hash of their ids, in order."""
    params = checkout() / "params"
    found = {}
    for file in sorted(params.rglob("*.yml")):
        module = ALL[file.stem.split("-")[0]]()
        if hasattr(module, "cases"):
            given = module.Params(**read_yaml(file) | {"device": "cpu"})
            ids = [case.case_id for case in module.cases(given)]
            digest = hashlib.sha256("".join(ids).encode()).hexdigest()[:16]
            found[file.relative_to(params).as_posix()] = [len(ids), digest]
    return found


def test_a_case_keeps_the_id_under_which_it_is_stored():
    assert case_ids() == json.loads(STORED.read_text())


if __name__ == "__main__":  # after a change that is meant
    STORED.write_text(json.dumps(case_ids(), indent=1) + "\n")
