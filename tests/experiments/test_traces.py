"""`trace: true` leaves a profile of each call that a notebook times, or is refused."""

import pytest

from nanolib.experiments import ALL
from tests.experiments.own import TINY
from tests.measuring import rows_of

_MODEL = {"overrides": TINY}
# Notebook → parameters that make it small, and what it profiles: scopes of one call each.
GIVEN = {
    "attention": ({"seq_lens": [32], "quality_patterns": []}, {"forward", "backward"}),
    "model": (
        _MODEL
        | {"seq_lens": [16], "generation_batch_sizes": [1], "new_tokens": 2, "loss_steps": 0},
        {"inference", "training_step", "prefill", "decode"},
    ),
    "fp8": (
        _MODEL | {"seq_len": 8, "precisions": ["bfloat16"], "parity_recipes": [], "numerics": []},
        {"training_step"},
    ),
}


@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_timed_is_profiled_on_request(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    given, scopes = GIVEN[name]
    params = ALL[name]().Params(**given, trace=True, device="cpu", budget_s=0.01, rel_ci=0.5)
    rows = rows_of(ALL[name](), params, tmp_path)
    ended = rows[rows["metric"] == "case_duration"]
    assert set(ended["status"]) <= {"ok", "unsupported"}, ended["message"].tolist()
    found = sorted((tmp_path / "traces").iterdir())
    assert {path.suffix for path in found} == {".json"}
    for scope in scopes:
        assert any(f"{scope.replace('_', '-')}-" in path.name for path in found)
