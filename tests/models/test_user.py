import sys
import textwrap

import pytest
import torch

from nanolib import NanoConfig, create_model
from nanolib.experiments.model import cases as model
from nanolib.experiments.model.steps import Training
from nanolib.measurement import BadInput, Unsupported
from nanolib.models.generation import generation_of
from nanolib.models.user import build_model, code_digest, logits_of, resolve
from nanolib.run.memory_plan import check_case
from tests.models.llama import llama_like
from tests.processes import invoked

SOURCE = """
    import torch

    class Bag(torch.nn.Module):
        def __init__(self, width=8, vocab=256):
            super().__init__()
            self.embedding = torch.nn.Embedding(vocab, width)
            self.head = torch.nn.Linear(width, vocab)

        def forward(self, ids):
            return self.head(self.embedding(ids).cumsum(dim=1))

    instance = Bag()

    def uses_up(shape):
        return Bag(**{name: shape.pop(name) for name in list(shape)})

    def configured():
        model = Bag()
        model.config = type("Config", (), {"use_cache": True})()
        return model
"""
IDS = torch.zeros(1, 4, dtype=torch.int64)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_model_for_test.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "own_model_for_test"


def test_a_model_of_ones_own_is_built_with_its_options_which_stay_whole(module):
    options = {"shape": {"width": 16}}
    one, again = (
        build_model(f"{module}:uses_up", options, "cpu", "bfloat16", seed=0) for _ in range(2)
    )
    assert one.embedding.weight.shape == (256, 16) and options == {"shape": {"width": 16}}
    assert one.embedding.weight.dtype is torch.bfloat16
    assert torch.equal(one.embedding.weight, again.embedding.weight)
    assert logits_of(one)(IDS).shape == (1, 4, 256)


def test_a_module_is_no_function_that_builds_one(module):
    with pytest.raises(BadInput, match="has no function 'instance'"):
        resolve(f"{module}:instance")


def test_a_model_fills_no_cache_unless_it_generates(module):
    model = build_model(f"{module}:configured", {}, "cpu", "float32")
    assert not model.config.use_cache and logits_of(model)(IDS).shape == (1, 4, 256)
    with pytest.raises(Unsupported, match="new_tokens: 0"):
        generation_of(model, IDS, 2)


def test_parameters_cases_and_a_dry_run_run_nothing_of_the_users(module, tmp_path):
    (tmp_path / f"{module}.py").write_text("raise SystemExit('it was run')")
    asked = "run", "model", "--dry-run", "-p", f"model={module}:build"
    ended = invoked(*asked, "--output", tmp_path / "out")
    assert ended.exit_code == 0 and "because the model is your own code" in ended.output
    assert {path.name for path in tmp_path.iterdir()} <= {f"{module}.py", "__pycache__"}


def test_an_encoder_neither_generates_nor_learns_and_says_so():
    bert = build_model("hf:BertModel", SMALL, "cpu", "float32")
    with pytest.raises(Unsupported, match="new_tokens: 0"):
        generation_of(bert, IDS, 2)
    with pytest.raises(Unsupported, match="and a loss needs"):
        Training(bert, IDS, "eager")()


def test_a_model_is_asked_no_longer_sequence_than_it_reads():
    params = model.Params(
        device="cpu",
        model="hf:LlamaForCausalLM",
        model_options=SMALL | {"max_position_embeddings": 64},
        seq_lens=[60],
        new_tokens=5,
    )
    generation = next(case for case in model.cases(params) if case.factors.get("new_tokens"))
    with pytest.raises(Unsupported, match="exceed the context_length 64"):
        check_case(generation)


@torch.no_grad()
def test_our_transformer_is_llama_to_the_digit():
    shape = {"d_model": 64, "num_layers": 3, "num_heads": 4, "d_ff": 96, "vocab_size": 300}
    for changes in ({"tie_embeddings": False}, {"num_kv_heads": 2}):
        ours = create_model(NanoConfig(**shape, context_length=64, **changes), seed=0).eval()
        ids = torch.randint(300, (2, 40))
        torch.testing.assert_close(logits_of(llama_like(ours))(ids), ours(ids), atol=1e-4, rtol=0)


def test_the_hash_of_the_users_code_follows_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "their_package"
    package.mkdir()
    for file in (tmp_path / "their_module.py", package / "__init__.py", package / "other.py"):
        file.write_text("")
    named = [
        {"model": "their_module:build"},
        {"attention_types": [{"kind": "own", "call": "their_package.inner:attend"}]},
    ]
    before = [code_digest(values) for values in named]
    assert all(before) and before == [code_digest(values) for values in named]
    (tmp_path / "their_module.py").write_text("a = 1")
    (package / "other.py").write_text("b = 1")
    assert not set(before) & {code_digest(values) for values in named}
    others = {"model": "hf:LlamaForCausalLM", "device": "cuda:0", "corpus": "no_such_module:text"}
    assert code_digest(others) == ""
