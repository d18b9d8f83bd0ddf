"""A model of the user's own in the notebooks that measure whole models: in the presets' place, by the same path."""

import pytest

from nanolib.experiments import ALL
from tests.experiments.own import LLAMA
from tests.measuring import rows_of

QUICK = {"device": "cpu", "budget_s": 0.02, "rel_ci": 0.5}
ASKED = {
    "energy": {
        "seq_lens": [8],
        "new_tokens": 4,
        "window_s": 1.1,
        "idle_s": 0.1,
        "profiling": ["minimal", "deep"],
    },
    "warmup": {
        "seq_len": 8,
        "steps": 6,
        "curve_steps": 20,
        "warmup_steps": [0],
        "directions": ["forward_backward"],
    },
    "fp8": {
        "seq_len": 16,
        "precisions": ["float32", "bfloat16", "fp8_tensorwise"],
        "modes": ["forward", "training_step"],
        "excluded_modules": ["lm_head"],
        "parity_recipes": [],
        "numerics": [],
    },
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's: a decoder with a head that gives logits."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch import nn\n\n\n"
        "class Small(nn.Module):\n"
        "    def __init__(self, width=32):\n"
        "        super().__init__()\n"
        "        self.embedding = nn.Embedding(256, width)\n"
        "        self.mixing = nn.Linear(width, width)\n"
        "        self.lm_head = nn.Linear(width, 256)\n\n"
        "    def forward(self, ids):\n"
        "        return self.lm_head(torch.tanh(self.mixing(self.embedding(ids))))\n\n\n"
        "def build(width=32):\n"
        "    return Small(width)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("small_ceilings")
@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        *((name, "mine:build", {"width": 48}) for name in sorted(ASKED)),
        ("fp8", "hf:LlamaForCausalLM", LLAMA | {"vocab_size": 256, "num_hidden_layers": 1}),
    ],
)
def test_it_is_measured_as_a_preset_is(tmp_path, own, name, model, options):
    if model.startswith("hf:"):
        pytest.importorskip("transformers")
    params = ALL[name]().Params(model=model, model_options=options, **QUICK, **ASKED[name])
    rows = rows_of(ALL[name](), params, tmp_path)
    ends = rows[(rows.metric == "case_duration") & rows["factor.preset"].notna()]
    assert set(ends["factor.preset"]) == {model}
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    assert wrong.empty, wrong[["status", "message", "factors"]].to_dict("records")
    assert (ends.status == "ok").sum() >= 2
    refused = ends[ends.status == "unsupported"].message
    assert name != "fp8" or refused.str.contains("cpu has no FP8 tensor cores").any()
