"""A model of the user's own in the notebooks that measure whole models: in the presets' place, by the same path."""

import pytest

from nanolib.experiments import ALL
from tests.measuring import rows_of

QUICK = {"device": "cpu", "budget_s": 0.02, "rel_ci": 0.5}
ASKED = {
    "energy": {
        "seq_lens": [8],
        "new_tokens": 4,
        "window_s": 1.1,
        "profiling": ["minimal", "deep"],
    },
    "warmup": {
        "directions": ["forward_backward"],
        "seq_len": 8,
        "steps": 6,
        "curve_steps": 20,
        "warmup_steps": [0],
    },
    "fp8": {
        "seq_len": 16,
        "modes": ["forward", "training_step"],
        "parity_recipes": [],
        "trace": True,
    },
}
OWN = """
import torch
from torch import nn
class Small(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.mixing = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, 256)
    def forward(self, ids):
        return self.lm_head(torch.tanh(self.mixing(self.embedding(ids))))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.parametrize("name", ASKED)
def test_it_is_measured_as_a_preset_is(tmp_path, monkeypatch, name):
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NANOLIB_OUTPUT", str(tmp_path))
    own = {"model": "mine:Small", "model_options": {"width": 48}}
    experiment = ALL[name]()
    if name == "warmup":  # two of five processes, which all do the same
        cases = experiment.cases
        monkeypatch.setattr(experiment, "cases", lambda params: cases(params)[:2])
    rows = rows_of(experiment, experiment.Params(**own, **QUICK, **ASKED[name]), tmp_path)
    ends = rows[(rows.metric == "case_duration") & rows["factor.preset"].notna()]
    assert set(ends["factor.preset"]) == {"mine:Small"}
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    assert wrong.empty, wrong[["status", "message", "factors"]].to_dict("records")
    assert (ends.status == "ok").sum() >= 2
    assert any(tmp_path.glob("traces/*training-step-*.json")) == (name == "fp8")
