"""`trace: true` leaves a profile of each call that a notebook times, or is refused."""

import pytest

from nanolib.experiments import ALL
from tests.experiments.own import TINY
from tests.measuring import rows_of

# Notebook → parameters that make it small, and what it profiles: scopes of one call each.
GIVEN = {
    "attention": ({"seq_lens": [32], "quality_attentions": []}, ["forward", "backward"]),
    "model": (
        {"overrides": TINY, "seq_lens": [16], "new_tokens": 2, "generation_batch_sizes": []},
        ["inference", "training-step", "prefill", "decode"],
    ),
}


@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_timed_is_profiled_on_request(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    given, scopes = GIVEN[name]
    params = ALL[name]().Params(**given, trace=True, device="cpu", budget_s=0.01, rel_ci=0.5)
    rows_of(ALL[name](), params, tmp_path)
    found = [path.name for path in (tmp_path / "traces").glob("*.json")]
    assert all(any(f"{scope}-" in name for name in found) for scope in scopes)
