"""Models that look at their data, end themselves or diverge: measured, or told in a line."""

import pytest

from nanolib.experiments.model import cases as model
from nanolib.experiments.model import look
from nanolib.experiments.model.planning import plan
from nanolib.measurement import BadInput
from nanolib.run import dry_run as plans
from nanolib.run import sweep
from nanolib.store import Store
from tests.experiments.own import LLAMA

QUICK = {"budget_s": 0.01, "new_tokens": 0, "loss_steps": 0, "generation_batch_sizes": []}
SMALL = {"num_layers": 1, "d_model": 32, "num_heads": 2, "vocab_size": 256}
MIXTRAL = LLAMA | {"num_hidden_layers": 1}
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
class Hidden(Looks):
    def forward(self, ids):
        return {"hidden": super().forward(ids)}
class Hangs(Looks):
    def forward(self, ids):
        while True:
            pass
def frozen():
    return Looks().requires_grad_(False)
class Ends(Looks):
    def forward(self, ids):
        raise SystemExit(3)
class Small(torch.nn.Module):
    def __init__(self, vocabulary=300):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(vocabulary, 8), torch.nn.Linear(8, 300)
    def forward(self, ids):
        return self.out(self.embed(ids))
class Masked(Small):
    def forward(self, ids, attention_mask):
        return super().forward(ids)
class Hungry(Small):
    def forward(self, ids):
        if ids.shape[1] > 16:
            raise MemoryError
        return super().forward(ids)
class Last(Small):
    def forward(self, ids):
        return super().forward(ids)[:, [-1]]
def missing():
    raise RuntimeError("no checkpoint here")
"""


@pytest.fixture
def store(tmp_path, monkeypatch, small_ceilings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_models.py").write_text(OWN)
    with Store(tmp_path / "results.sqlite") as store:
        yield store


def _measured(store, experiment, params):
    run = sweep.measure(experiment, params, store=store, progress=False)
    run.finish()
    return store.measurements(samples=True)


def _ends(rows):
    return rows[rows["metric"] == "case_duration"].set_index("case_id")["status"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("odd_models:Looks", {}),
        ("odd_models:Pair", {}),
        pytest.param("hf:MixtralForCausalLM", MIXTRAL, id="mixture"),
        pytest.param("hf:BartForCausalLM", BART, id="the half of an encoder-decoder"),
    ],
)
def test_what_cannot_be_foreseen_is_measured_all_the_same(store, name, options):
    params = model.Params(model=name, model_options=options, seq_lens=[16], device="cpu", **QUICK)
    plans.prediction_table(model, params)  # which must not fail where nothing can be foreseen
    rows = _measured(store, model, params)
    assert set(_ends(rows)) == {"ok"}
    flops = rows[(rows["metric"] == "flops") & (rows["scope"] == "inference")]
    counted = flops.groupby("method")["estimate"].agg(["nunique", "max"])
    assert set(counted.index) == {"kept", "flop_counter"} and (counted["nunique"] == 1).all()
    assert 0 < counted["max"]["kept"] <= counted["max"]["flop_counter"]


@pytest.mark.parametrize(
    ("name", "options", "asked", "modes", "said"),
    [
        (
            "odd_models:Last",
            {},
            {"loss_steps": 2},
            {"training", "loss"},
            r"logits of shape \[1, 1, 300\], and a loss takes logits of shape \[1, 16, 'vocab'\]",
        ),
        (
            "odd_models:Hidden",
            {},
            {},
            {"training"},
            "the model returns dict, and a loss takes logits of shape",
        ),
        (
            "odd_models:frozen",
            {},
            {},
            {"training"},
            "has no weight that learns; leave the loss out: train: false",
        ),
    ],
)
def test_what_a_model_cannot_do_is_unsupported_with_a_reason_and_the_rest_measured(
    store, name, options, asked, modes, said
):
    params = model.Params(
        model=name, model_options=options, seq_lens=[16], device="cpu", **QUICK | asked
    )
    rows = _measured(store, model, params)
    ends = rows[rows["metric"] == "case_duration"]
    refused = ends[ends["status"] != "ok"]
    assert set(refused["status"]) == {"unsupported"}
    assert refused["message"].str.contains(said).all()
    assert (
        set(refused["factor.mode"].fillna("loss")) == modes
        and (ends["factor.mode"] == "inference").any()
    )


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Small", {"vocabulary": 65}, "index out of range"),
        ("Masked", {}, "Masked.forward() missing 1 required positional"),
        ("Small", {"wdth": 3}, "unexpected keyword argument 'wdth'"),
        ("missing", {}, "RuntimeError: no checkpoint here"),
    ],
)
def test_what_fails_to_build_or_run_is_an_error_row_with_its_reason(store, name, options, said):
    given = {
        "model": f"odd_models:{name}",
        "model_options": options,
        "device": "cpu",
        "seq_lens": [24],
    }
    rows = _measured(store, model, model.Params(**given, **QUICK | {"train": False}))
    ends = rows[(rows["metric"] == "case_duration") & rows["factor.preset"].notna()]
    assert (
        set(ends["status"]) == {"error"} and ends["message"].str.contains(said, regex=False).all()
    )


def test_a_length_for_which_there_is_too_little_memory_leaves_the_shorter_theirs(store):
    params = model.Params(
        model="odd_models:Hungry", seq_lens=[8, 24], device="cpu", **QUICK | {"train": False}
    )
    rows = _measured(store, model, params)
    ends = rows[(rows["metric"] == "case_duration") & rows["factor.preset"].notna()]
    assert list(zip(ends["factor.seq_len"], ends["status"], strict=True)) == [
        (8, "ok"),
        (24, "oom"),
    ]


def test_one_that_ends_itself_ends_its_case_alone(store):
    params = model.Params(
        model="odd_models:Ends", seq_lens=[16], train=False, device="cpu", **QUICK
    )
    ends = _ends(_measured(store, model, params))
    assert "error" in set(ends) and len(ends) > 1
    with pytest.raises(BadInput, match="cannot be planned: SystemExit: 3"):
        plan("odd_models:Ends", "1GiB")


def test_one_that_never_returns_is_timed_out_and_does_not_hold_up_what_is_predicted(
    store, monkeypatch
):
    monkeypatch.setattr(look, "_LIMIT_S", 0.5)
    params = model.Params(
        model="odd_models:Hangs",
        seq_lens=[16],
        train=False,
        device="cpu",
        **QUICK | {"case_timeout_s": 1.5},
    )
    plans.prediction_table(model, params)
    (own,) = (case for case in model.cases(params) if case.runs_code)
    assert own.plan().reason == "not planned: it takes over 0.5 s"
    ends = _measured(store, model, params)
    ends = ends[(ends["metric"] == "case_duration") & (ends["factor.preset"] == "odd_models:Hangs")]
    assert set(ends["status"]) == {"timeout"} and (ends["estimate"] >= 1.4).all()


def test_a_loss_that_diverges_keeps_what_was_finite_and_says_from_where_on_it_is_not(store):
    asked = QUICK | {"loss_steps": 12, "learning_rate": 10, "dtypes": ["float16"]}
    rows = _measured(
        store,
        model,
        model.Params(seq_lens=[32], overrides=SMALL, train=False, device="cpu", **asked),
    )
    (loss,) = rows[rows["metric"] == "loss"].to_dict("records")
    (ended,) = rows[
        (rows["metric"] == "case_duration") & (rows["case_id"] == loss["case_id"])
    ].to_dict("records")
    assert (
        ended["status"] == "error"
        and f"not finite from step {len(loss['samples']) + 1} of 12 on" in ended["message"]
    )
