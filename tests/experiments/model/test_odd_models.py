"""Models that look at their data, or that no loss can train: measured, or told in a line."""

import sys

import pytest
import torch

from nanolib.experiments import ALL
from nanolib.experiments.model import cases as model
from nanolib.run import prepare as plans
from nanolib.run import sweep
from nanolib.store import Store
from tests.experiments import own

QUICK = {"budget_s": 0.01, "new_tokens": 0, "generation_batch_sizes": [], "seq_lens": [16]}
BART = {
    "d_model": 32,
    "vocab_size": 300,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 32,
}
OWN = """
import torch
class Looks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300)
    def forward(self, ids):
        assert int(ids.sum()) >= 0
        return self.out(self.embed(ids))
class Pair(Looks):
    def forward(self, ids):
        return (super().forward(ids), None)
class Last(Looks):
    def forward(self, ids):
        return self.out(self.embed(ids))[:, [-1]]
"""


@pytest.fixture
def store(tmp_path, monkeypatch, small_ceilings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_models.py").write_text(OWN)
    with Store(tmp_path / "results.sqlite") as store:
        yield store


def _params(name, **changes):
    return model.Params(model=name, device="cpu", **QUICK | changes)


def _measured(store, name, **changes):
    sweep.measure(model, _params(name, **changes), store=store).finish()
    return store.measurements(samples=True)


def _ends(rows):
    return rows[(rows["metric"] == "case_duration") & rows["factor.preset"].notna()]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("odd_models:Pair", {}),  # which also looks at its data
        ("hf:BartForCausalLM", BART),  # the half of an encoder-decoder
    ],
)
def test_what_cannot_be_foreseen_is_measured_all_the_same(store, name, options):
    # which must not fail where nothing can be foreseen
    plans.prediction_table(model, _params(name, model_options=options))
    rows = _measured(store, name, model_options=options)
    assert set(_ends(rows)["status"]) == {"ok"}
    flops = rows[(rows["metric"] == "flops") & (rows["scope"] == "inference")]
    counted = flops.groupby("method")["estimate"].agg(["nunique", "max"])
    assert set(counted.index) == {"kept", "flop_counter"} and (counted["nunique"] == 1).all()
    assert 0 < counted["max"]["kept"] <= counted["max"]["flop_counter"]


def test_what_a_model_cannot_do_is_unsupported_with_a_reason_and_the_rest_measured(store):
    ends = _ends(_measured(store, "odd_models:Last"))
    said = r"logits of shape \[1, 300\] for each sequence, and a loss needs \[16, 'vocab'\]"
    refused = ends[ends["status"] != "ok"]
    assert set(refused["status"]) == {"unsupported"}
    assert refused["message"].str.contains(said).all()
    assert set(refused["factor.mode"]) == {"training"}
    assert (ends["factor.mode"] == "inference").any()


@pytest.mark.parametrize(
    ("name", "options", "tokens"),
    [
        ("decoder_tiny", {"vocab_size": 100}, 100),
        ("hf:GPT2LMHeadModel", {"vocab_size": 99}, 99),
        ("odd_models:Looks", {}, 256),
    ],
)
def test_ids_are_random_tokens_of_the_vocabulary(name, options, tokens):
    case = own.case("inference", name, options, (4000, 2))
    ids = case.random_ids(0)
    assert ids.shape == (2, 4001) and ids.unique().tolist() == [*range(tokens)]
    assert torch.equal(ids, case.random_ids(0))
    assert not torch.equal(ids, case.random_ids(1))


@pytest.mark.parametrize("name", ["model", "energy"])
def test_a_model_of_a_missing_library_is_unsupported_before_a_run(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "transformers", None)
    experiment = ALL[name]()
    params = experiment.Params(model="hf:LlamaForCausalLM", device="cpu", seq_lens=[16])
    *_, line = plans.dry_run_table(experiment.cases(params), {})["here"]
    assert line.startswith("unsupported: transformers is not installed")
