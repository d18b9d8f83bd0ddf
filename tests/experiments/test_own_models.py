"""A model of the user's own in the notebooks that measure whole models: in the presets' place, by the same path."""

import pytest

from nanolib.experiments import ALL
from nanolib.measurement import BadInput
from nanolib.run import sweep
from nanolib.store import Store

LLAMA = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
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
        ("fp8", "hf:LlamaForCausalLM", LLAMA),
    ],
)
def test_it_is_measured_as_a_preset_is(tmp_path, own, name, model, options):
    if model.startswith("hf:"):
        pytest.importorskip("transformers")
    params = ALL[name]().Params(model=model, model_options=options, **QUICK, **ASKED[name])
    with Store(tmp_path / "results.sqlite") as store:
        rows = sweep.measure(ALL[name](), params, store=store, progress=False).measurements()
    ends = rows[(rows.metric == "case_duration") & rows["factor.preset"].notna()]
    assert set(ends["factor.preset"]) == {model}
    wrong = ends[~ends.status.isin(["ok", "unsupported"])]
    assert wrong.empty, wrong[["status", "message", "factors"]].to_dict("records")
    assert (ends.status == "ok").sum() >= 2
    refused = ends[ends.status == "unsupported"].message
    assert name != "fp8" or refused.str.contains("cpu has no FP8 tensor cores").any()


@pytest.mark.parametrize("name", sorted(ASKED))
def test_bad_ones_get_one_line_before_anything_runs(name):
    pytest.importorskip("transformers")
    long = {"seq_lens": [200]} if name == "energy" else {"seq_len": 200}
    llama = {"model": "hf:LlamaForCausalLM", "model_options": LLAMA}
    for given, said in (
        ({"model_options": {"width": 3}}, "model_options: needs a model"),
        ({"model": "no colon"}, "model: "),
        (llama | long, "exceeds the max_position_embeddings 64"),
    ):
        with pytest.raises(BadInput, match=said) as told:
            ALL[name]().Params(**given)
        assert len(told.value.lines) == 1
